"""Reports: each file here turns saved records into text or a picture, and knows nothing else."""
