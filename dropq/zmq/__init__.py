"""A queue as PZQ's three sockets; needs the extra `zmq`."""
