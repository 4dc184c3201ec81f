"""Questions about a dataset: functions from its folder to a value, without a request or a terminal."""
