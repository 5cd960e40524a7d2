"""Never returns."""


def attack(argument):
    while True:
        pass
