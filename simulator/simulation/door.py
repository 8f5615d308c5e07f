"""`run` as users call it: with a scenario, or with what one is loaded from."""

from simulator.scenario.load import loads
from simulator.simulation import run as simulation

run = loads(simulation.run)
