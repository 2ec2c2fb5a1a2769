"""From loss to World: events go in, decisions come out. No sockets, no threads, no clock of its own."""
