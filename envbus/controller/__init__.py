"""The fleet: who launches and watches servers on a host, what operators see of all of them, and their orders."""
