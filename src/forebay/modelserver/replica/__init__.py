"""A model server as a replica of a cluster: one model under the cluster's name for it, behind gateways."""
