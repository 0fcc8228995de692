"""Refuse the malformed: what must hold for every group, sample and batch, checked on every one."""
