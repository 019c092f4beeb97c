"""A page in the browser that shows the fleet live. It reads only: nothing here gives an order."""
