"""Abstract test suites for people who write a field, a filter or a source of their own. Needs pytest and Hypothesis."""
