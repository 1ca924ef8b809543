"""A Kubeflow TrainJob (Kubeflow Trainer 2.2 or newer) that trains by a recipe on Kubernetes, as YAML.

The cluster's runtime `torch-distributed` starts one pod a node and tells torchrun its place by PET_ variables. YAML is
written from a template, without a library: lists are JSON, which YAML contains.
"""

import json
from collections.abc import Sequence

from vitrail import recipes
from vitrail.config import Recipe
from vitrail.training.plan import PlannedMachine, build_train_command, check_has_job

DATA_VOLUME, RUNS_VOLUME = "/data", "/work/runs"  # where the pods find them; the image works in /work
_CPUS_PER_GPU = 8  # as the SLURM script requests
_TEMPLATE = """\
# kubectl create --filename NAME.yaml
# It needs Kubeflow Trainer 2.2 or newer with the runtime torch-distributed, an image built from Dockerfile.train, and
# two volume claims: `data`, mounted at {data_volume}, and `runs`, mounted at {runs_volume}, which every pod can write
# (ReadWriteMany). The run reads {data} and writes {out}.
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: "{name}"
spec:
  runtimeRef:
    name: torch-distributed
  trainer:
    image: vitrail-train
    command: ["torchrun", "-m", "vitrail"]
    # A pod that is started again resumes from the newest checkpoint in the volume.
    args: {arguments}
    numNodes: {nodes}
    numProcPerNode: {gpus}
    resourcesPerNode:
      requests:
        cpu: "{cpus}"
      limits:
        nvidia.com/gpu: "{gpus}"
    env:
      - name: XDG_DATA_HOME # which images are held out
        value: {runs_volume}/.data
      - name: XDG_CACHE_HOME # the index of the dataset
        value: {runs_volume}/.cache
  runtimePatches:
    - manager: vitrail/plan
      trainingRuntimeSpec:
        template:
          spec:
            replicatedJobs:
              - name: node
                template:
                  spec:
                    template:
                      spec:
                        # SIGTERM saves a checkpoint.
                        terminationGracePeriodSeconds: 300
                        securityContext:
                          fsGroup: 10001 # the image's user
                        containers:
                          - name: node
                            volumeMounts:
                              - name: data
                                mountPath: {data_volume}
                                readOnly: true
                              - name: runs
                                mountPath: {runs_volume}
                              - name: shared-memory
                                mountPath: /dev/shm
                        volumes:
                          - name: data
                            persistentVolumeClaim:
                              claimName: data
                              readOnly: true
                          - name: runs
                            persistentVolumeClaim:
                              claimName: runs
                          - name: shared-memory # of the loader's processes
                            emptyDir:
                              medium: Memory
"""


def make_train_job(name: str, recipe: Recipe, machine: PlannedMachine) -> str:
    """Write a TrainJob that trains by the recipe on the images in /data, and resumes when a pod is started again."""
    check_has_job("--kubernetes", name, machine)
    out, data = f"{RUNS_VOLUME}/{name}", f"{DATA_VOLUME}/{recipes.RECIPES[name].data}"
    command = build_train_command(name, recipe, machine, out=out)
    return format_train_job(name, command, nodes=machine.nodes, gpus=machine.gpus, data=data, out=out)


def format_train_job(name: str, command: Sequence[str], *, nodes: int, gpus: int, data: str, out: str) -> str:
    """Write the TrainJob of a training command without its data; `data` and `out` are as the pods see them."""
    return _TEMPLATE.format(
        name=name,
        arguments=json.dumps([*command[1:], "--data", data]),
        nodes=nodes,
        gpus=gpus,
        cpus=_CPUS_PER_GPU * gpus,
        data=data,
        out=out,
        data_volume=DATA_VOLUME,
        runs_volume=RUNS_VOLUME,
    )
