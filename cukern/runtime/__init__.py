"""From a .cu file to a launch; knows no op."""
