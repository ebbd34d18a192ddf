"""slime, or what stands in for it, before the tests import it."""

from tests.integrations_slime import slimes

slimes.install()
