"""The HTTP front of the model server: the Open Inference Protocol on `net.server`."""
