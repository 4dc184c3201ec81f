"""Which rows stay: filters and the annotators that give them scores."""
