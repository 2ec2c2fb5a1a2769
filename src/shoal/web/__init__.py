"""What the page and the service share: who may ask over HTTP, and how they are answered."""
