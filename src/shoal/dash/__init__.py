"""runs -> a page: `shoal dash` shows in a browser what run folders hold."""
