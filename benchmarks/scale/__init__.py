"""What a load of very many partitions costs beside the work on the partitions themselves."""
