"""Which chat templates are plain: no single step of theirs can take long."""

from __future__ import annotations

import pytest

from surefoot.learner.chat import TEMPLATE_FOLDER
from surefoot.learner.rendering import LONGEST, is_plain

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PLAIN = {
    "chatml": CHATML,
    "roles that take turns": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] | trim }}{% endfor %}",
    "a system message put in front": "{% if messages[0].role != 'system' %}"
    "{% set messages = [{'role': 'system', 'content': 'x'}] + messages %}{% endif %}{{ messages[0].content }}",
    "thoughts taken away": "{% set ns = namespace(last=0) %}{% for m in messages[::-1] %}"
    "{% set index = (messages|length - 1) - loop.index0 %}{% set ns.last = index %}"
    "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% endif %}"
    "{{ messages[index].content }}{% endfor %}",
    "tools": "{% if tools %}{% for tool in tools %}{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}"
    "{% for k, v in tools[0].function.parameters.properties.items() %}{{ k }}: {{ v.get('type', 'any') }}{% endfor %}",
    "a macro": "{% macro show(m) %}{{ m.content }}{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}",
    "leaving a loop": "{% for m in messages %}{% if m.role in ['user', 'tool'] %}{% break %}{% endif %}{% endfor %}",
    "some of the messages": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join }}",
    "the date": "{{ strftime_now('%d %b %Y') }}",
}
NOT_PLAIN = {
    "a power": "{{ 9 ** (9 ** 9) }}",
    "a power in a test": "{% if 9 ** (9 ** 9) > 1 %}x{% endif %}",
    "a product": "{% for i in range(60) %}{% set x = y * y %}{% endfor %}",
    "a remainder of numbers without end": "{{ a % b }}",
    "lists that hold each other": "{% set ns = namespace(a=[0], b=[0]) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
    "lists put together": "{% for i in range(60) %}{% set ns.a = [ns.a] + [ns.a] %}{% endfor %}",
    "lists one after the other": "{% set a = [x, x] %}" * 10,
    "pairs in a macro": "{% macro f(a) %}{{ (a, a) }}{% endmacro %}{{ f(1) }}",
    "arguments of a macro": "{% macro f() %}{{ varargs }}{% endmacro %}{{ f(1, 2) }}",
    "a sum of lists": "{{ x | sum(start=[]) }}",
    "batches": "{{ (x + x) | batch(2) | list }}",
    "a filter by another name": "{{ x | map('sum') | list }}",
    "a filter that is not named": "{{ x | map(y) | list }}",
    "stripping many characters": "{{ x.strip(y) }}",
    "trimming many characters": "{{ x | trim(y) }}",
    "searching from the end": "{{ x.rsplit(y) }}",
    "a method kept for later": "{% set range = ''['rsplit'] %}{{ range('x') }}",
    "a method in a namespace": "{% set ns = namespace(strip=''['rsplit']) %}{{ ns.strip('x') }}",
    "a method put into a namespace": "{% set ns = namespace() %}{% set ns.strip = ''['rsplit'] %}{{ ns.strip('x') }}",
    "a method in a dict": "{{ {'strip': ''['rsplit']}.strip('x') }}",
    "a method under a key that is made": "{{ {'str' ~ 'ip': ''['rsplit']}.strip('x') }}",
    "something called by place": "{{ ''['rsplit']('x') }}",
    "dict": "{{ dict(a=x, b=x) }}",
    "lipsum": "{{ lipsum(1000) }}",
    "a loop in itself": "{% for a in x recursive %}{{ loop(a) }}{% endfor %}",
    "another file": "{% include 'x' %}",
    "regular expressions": "{{ x | urlize }}{{ x | striptags }}{{ x | wordwrap }}",
    "a large number": "{{ x // 99999999999999999999 }}",
    "what cannot be parsed": "{% for %}",
    "brackets without end": "{{ " + "(" * 3000 + ")" * 3000 + " }}",
    "a long one": "x" * (LONGEST + 1),
    "marks of the assistant's words": "{% generation %}x{% endgeneration %}",
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_usual_template_is_plain(name: str) -> None:
    assert is_plain(PLAIN[name])


@pytest.mark.parametrize(
    "path", sorted(TEMPLATE_FOLDER.parent.rglob("*.jinja")), ids=lambda path: f"{path.parent.name}/{path.stem}"
)
def test_our_own_templates_are_plain(path) -> None:  # type: ignore[no-untyped-def]
    assert is_plain(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_a_template_with_a_step_that_may_last_is_not_plain(name: str) -> None:
    assert not is_plain(NOT_PLAIN[name])


def test_what_is_not_plain_stays_so_beside_what_is() -> None:
    for name, template in NOT_PLAIN.items():
        assert not is_plain(CHATML + template), name
