"""TensorFlow's ParameterServerStrategy: worker 0 is the chief, 1 holds the variables, the others compute."""

import json
import os
import socket
import time

import tensorflow as tf

config = json.loads(os.environ["TF_CONFIG"])
chief, server, *workers = config["cluster"]["worker"]
cluster = tf.train.ClusterSpec({"chief": [chief], "ps": [server], "worker": workers})
roles = [("chief", 0), ("ps", 0), *(("worker", index) for index in range(len(workers)))]
role, index = roles[config["task"]["index"]]


def is_there(address):
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


def serve():
    """A server of TensorFlow has no end of its own: this one ends when the chief has."""
    running = tf.distribute.Server(cluster, job_name=role, task_index=index, protocol="grpc")
    while not is_there(chief):
        time.sleep(0.1)
    while is_there(chief):
        time.sleep(0.1)
    return {"address": running.target}


def train():
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, task_type=role, task_id=index, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weights = tf.Variable([0.0, 0.0])

    @tf.function
    def step(seed):
        x = tf.random.stateless_normal((8, 2), seed=(seed, 1))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.linalg.matvec(x, weights - [1.0, 2.0]) ** 2)
        weights.assign_sub(0.1 * tape.gradient(loss, weights))

    for seed in range(60):
        coordinator.schedule(step, args=(seed,))
    coordinator.join()
    return {"device": weights.device, "weights": weights.numpy().tolist()}


print(json.dumps({"role": role, **(train() if role == "chief" else serve())}))
