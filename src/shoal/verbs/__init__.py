"""What can be typed after `shoal`: a function for each verb reads its options and calls the part that does it."""
