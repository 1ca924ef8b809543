"""A Kubeflow TrainJob (Kubeflow Trainer 2.2 or newer) that trains by a recipe on Kubernetes, as YAML.

The cluster's runtime `torch-distributed` starts one pod a node and tells torchrun its place by PET_ variables. YAML is
written from a template, without a library: lists are JSON, which YAML contains.
"""

import json

from vitrail import recipes
from vitrail.config import Recipe
from vitrail.errors import UsageError
from vitrail.training.plan import TPU_NAME, PlannedMachine, build_train_command

_CPUS_PER_GPU = 8  # as the SLURM script requests
_TEMPLATE = """\
# kubectl create --filename NAME.yaml
# It needs Kubeflow Trainer 2.2 or newer with the runtime torch-distributed, an image built from Dockerfile.train, and
# two volume claims: `data` with the dataset, and `runs`, which every pod can write (ReadWriteMany).
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {name}
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
        value: /work/runs/.data
      - name: XDG_CACHE_HOME # the index of the dataset
        value: /work/runs/.cache
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
                                mountPath: /data
                                readOnly: true
                              - name: runs
                                mountPath: /work/runs
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
    if name not in recipes.RECIPES:
        raise UsageError(f"--kubernetes is for a recipe, and {name} is a preset: `vitrail list recipes` shows them")
    if machine.gpu == TPU_NAME:
        raise UsageError(
            "--kubernetes is for GPUs, and tpuv3 only counts costs as the paper does: name a GPU with --gpu"
        )
    command = build_train_command(name, recipe, machine, out=f"/work/runs/{name}")
    arguments = [*command[1:], "--data", f"/data/{recipes.RECIPES[name].data}"]
    return _TEMPLATE.format(
        name=name,
        arguments=json.dumps(arguments),
        nodes=machine.nodes,
        gpus=machine.gpus,
        cpus=_CPUS_PER_GPU * machine.gpus,
    )
