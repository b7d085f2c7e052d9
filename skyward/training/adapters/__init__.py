"""The folder of one documented path; everything else about other frameworks is in `skyward.training.frameworks`."""
