"""The tests of the conformance suite, a subject each; they are put together in `transportkit.testing.conformance`."""
