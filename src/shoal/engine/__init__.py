"""nodes -> workers: the Engine protocol and the engines that start workers."""
