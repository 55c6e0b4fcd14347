"""What torch needs of an op: raw ops, autograd, transforms, versions, autocast, DTensors."""
