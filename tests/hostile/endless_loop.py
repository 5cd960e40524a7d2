"""Never comes back."""


def attack(argument):
    while True:
        pass
