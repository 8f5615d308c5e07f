"""What Headway's makers run: it is in a checkout, not in the installed package.

It may import all packages. Start with `profiles/fit.py`: it made the shipped cost profiles.
"""
