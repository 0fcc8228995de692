"""Honest code in many styles, with tests as people write them: what a strict grader must not take away."""

from __future__ import annotations

STYLES: dict[str, tuple[str, str]] = {
    "a Solution class": ("""
class Solution:
  def two(self,xs,t): return [0,1]
  def rot(self,m): m[:]=[list(r) for r in zip(*m[::-1])]
""", """
s = Solution()
assert s.two([2,7],9)==[0,1]
m=[[1,2],[3,4]]
Solution().rot(m)
assert m==[[3,1],[4,2]]
"""),
    "linked lists": ("""
class ListNode:
  def __init__(s,val=0,next=None): s.val=val; s.next=next
def rev(h):
  p=None
  while h: h.next,p,h=p,h,h.next
  return p
""", """
def build(vs):
    head=None
    for v in reversed(vs):
        head=ListNode(v,head)
    return head
def vals(n):
    out=[]
    while n:
        out.append(n.val)
        n=n.next
    return out
assert vals(rev(build([1,2,3])))==[3,2,1]
assert rev(None) is None
"""),
    "closures": ("""
def make(n):
  def add(x): return x+n
  return add
""", """
add5=make(5)
assert add5(3)==8 and make(1)(1)==2
assert callable(make(3))
"""),
    "a closure with state": ("""
def counter():
  n=0
  def up():
    nonlocal n
    n+=1
    return n
  return up
""", """
c=counter()
assert [c(),c()]==[1,2]
"""),
    "an endless generator": ("""
def fib():
  a,b=0,1
  while True:
    yield a
    a,b=b,a+b
""", """
g=fib()
assert [next(g) for _ in range(6)]==[0,1,1,2,3,5]
"""),
    "an enumeration": ("""
import enum
class Color(enum.Enum):
  RED=1
  BLUE=2
""", """
assert Color.RED.value==1
assert Color.BLUE.name=='BLUE'
assert [c.value for c in Color]==[1,2]
"""),
    "data classes": ("""
import dataclasses
@dataclasses.dataclass
class P:
  x:int
  y:int
def mid(a,b): return P((a.x+b.x)//2,(a.y+b.y)//2)
""", """
p=mid(P(0,0),P(2,4))
assert (p.x,p.y)==(1,2)
"""),
    "methods of the class": ("""
class M:
  K=3
  @staticmethod
  def add(a,b): return a+b
  @classmethod
  def make(cls): return cls()
  @property
  def size(self): return 2
""", """
assert M.add(1,2)==3 and M.K==3 and M.make().size==2
"""),
    "an iterable class": ("""
class Count:
  def __init__(s,n): s.n=n
  def __iter__(s): return iter(range(s.n))
""", """
assert list(Count(3))==[0,1,2]
assert sum(x for x in Count(4))==6
"""),
    "an iterator class": ("""
class Down:
  def __init__(s,n): s.n=n
  def __iter__(s): return s
  def __next__(s):
    if s.n<=0: raise StopIteration
    s.n-=1
    return s.n+1
""", """
assert [x for x in Down(3)]==[3,2,1]
d=Down(1)
assert next(d)==1
try:
    next(d)
    assert False
except StopIteration:
    pass
"""),
    "objects in lists and keys": ("""
class Person:
  def __init__(s,n,a): s.name,s.age=n,a
def oldest(ps): return max(ps,key=lambda p:p.age)
def by(ps,key): return sorted(ps,key=key)
""", """
ps=[Person('a',3),Person('b',9)]
assert oldest(ps).name=='b'
assert [p.name for p in by(ps,lambda p: -p.age)]==['b','a']
"""),
    "a container class": ("""
class Tree:
  def __init__(s): s.r=None;s.xs=[]
  def insert(s,x): s.xs.append(x); s.xs.sort()
  def __contains__(s,x): return x in s.xs
  def inorder(s): yield from s.xs
  def __len__(s): return len(s.xs)
""", """
t=Tree()
for v in [3,1,2]:
    t.insert(v)
assert 2 in t and 5 not in t
assert list(t.inorder())==[1,2,3] and len(t)==3
"""),
    "exceptions": ("""
def f(x):
  if x<0: raise ValueError('neg')
  return x
""", """
try:
    f(-1)
    assert False
except ValueError as e:
    assert 'neg' in str(e)
assert f(1)==1
"""),
    "a unittest class with setUp": ("""
class Q:
  def __init__(s): s.d=[]
  def enqueue(s,x): s.d.append(x)
  def dequeue(s):
    if not s.d: raise IndexError('empty')
    return s.d.pop(0)
  def is_empty(s): return not s.d
""", """
import unittest
from solution import Q
class TestQ(unittest.TestCase):
    def setUp(self):
        self.q=Q()
    def test_a(self):
        self.assertTrue(self.q.is_empty())
        self.q.enqueue(1)
        self.assertFalse(self.q.is_empty())
        self.assertEqual(self.q.dequeue(),1)
    def test_b(self):
        with self.assertRaises(IndexError):
            self.q.dequeue()

"""),
    "a dict in place": ("""
def inc(d,k): d[k]=d.get(k,0)+1
""", """
counts={}
for w in ['a','b','a']:
    inc(counts,w)
assert counts=={'a':2,'b':1}
"""),
    "a list in place, and its length": ("""
def dd(a):
  k=0
  for x in a:
    if k==0 or a[k-1]!=x: a[k]=x; k+=1
  return k
""", """
nums=[1,1,2]
k=dd(nums)
assert k==2 and nums[:k]==[1,2]
"""),
    "HumanEval with metadata": ("""
def f(x): return x
""", """
METADATA = {'author': 'x'}
def check(candidate):
    assert candidate([]) == []
    assert candidate({'a':(1,2)}) == {'a':(1,2)}, 'msg'
    assert True, 'edge'
check(f)
"""),
    "callbacks": ("""
def each(xs,f):
  for x in xs: f(x)
""", """
out=[]
each([1,2],out.append)
assert out==[1,2]
import operator
from functools import reduce
def fold(f,xs):
    return reduce(f,xs)
assert fold(operator.add,[1,2])==3
"""),
    "results that tests sort": ("""
def groups(ws):
  d={}
  for w in ws: d.setdefault(''.join(sorted(w)),[]).append(w)
  return list(d.values())
""", """
res=groups(['ab','ba','c'])
res.sort(key=len)
assert res==[['c'],['ab','ba']]
assert sorted(map(sorted,groups(['x'])))==[['x']]
"""),
    "a cache": ("""
class LRUCache:
  def __init__(s,c): s.c=c;s.d={}
  def get(s,k):
    if k in s.d: s.d[k]=s.d.pop(k); return s.d[k]
    return -1
  def put(s,k,v):
    s.d.pop(k,None); s.d[k]=v
    if len(s.d)>s.c: s.d.pop(next(iter(s.d)))
""", """
cache=LRUCache(1)
cache.put(1,1)
cache.put(2,2)
assert cache.get(1)==-1 and cache.get(2)==2
"""),
    "text of objects": ("""
class V:
  def __init__(s,x): s.x=x
  def __repr__(s): return f'V({s.x})'
  def scale(s,k): return V(s.x*k)
""", """
v=V(2)
assert repr(v)=='V(2)'
assert str(v.scale(3))=='V(6)' and v.scale(2).x==4
"""),
}  # fmt: skip
