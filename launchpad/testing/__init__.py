"""The pytest plugin: tests that run on several ranks (`@pytest.mark.ranks(4)`)."""
