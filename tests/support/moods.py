"""A world whose verdict depends on nothing that could be repeated: only a cassette gives the same run twice."""

WORLD = '''
import random

class Mood:
    def reset(self, **row):
        self.calls = 0

    def ask(self, question: str) -> str:
        """Ask.

        Args:
            question: what
        """
        return str(random.SystemRandom().random())

    def get_reward(self) -> float:
        return random.SystemRandom().random()
'''
