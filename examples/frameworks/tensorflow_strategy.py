"""TensorFlow's MultiWorkerMirroredStrategy: run it with --tf-config, which tells each rank of all workers."""

import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank, size = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync
total = strategy.reduce("sum", strategy.run(lambda: tf.constant(rank + 1.0)), axis=None)
print(f"worker {rank} of {size}: the sum is {total.numpy():g}")
