"""The optimizer: what is updated with which hyper-parameters, in what order, when."""
