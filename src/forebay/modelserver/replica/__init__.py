"""A model server as a replica in a cluster: one model under the cluster's name for it, behind gateways."""
