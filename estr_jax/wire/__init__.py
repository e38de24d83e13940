"""Learner and samplers over a network: the only room that knows gRPC and protobuf."""
