"""Spark: run a function as the ranks of a job, in a barrier stage of a Spark application.

    import multiring.spark, pyspark.sql

    spark = pyspark.sql.SparkSession.builder.master("spark://host0:7077").getOrCreate()
    accuracies = multiring.spark.run(train, num_proc=4, kwargs={"rate": 0.1})

Importing this package does not import Spark.
"""

from multiring._former_names import keep_to_public_names
from multiring.spark.running import run

__all__ = ["run"]

keep_to_public_names(__name__)
