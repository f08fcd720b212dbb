"""The five theorems of JoMA, each against an independent solution."""
