"""Fast implementations; the tests compare each with a plain version of the same computation."""
