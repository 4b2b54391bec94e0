"""The tests are a package, so that ranks can import their functions by name; ranks get the guards with it."""

from tests import guards

guards.install()
