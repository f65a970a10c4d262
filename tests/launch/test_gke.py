"""Documents of a run on GKE: they fit the API's own models, and say what a run needs."""

from __future__ import annotations

import dataclasses
import importlib
import json

import pytest
import yaml

from ddiloco.config import ConfigError, from_dict
from ddiloco.launch import gke
from ddiloco.launch.cloud import as_yaml
from tests.launch.placed import placed

OPTIONS = {"claim": "work", "service_account": "trainer"}
ADDRESSES = ("10.0.0.1", "10.0.0.2")
PUBLIC = {"learner-0.key": "public\nkey\n"}
SECRETS = {f"{role}.key_secret": f"secret of {role}" for role in ("learner-0", "syncer-1")}


def rendered(topologies, places=(), options=OPTIONS, **more):
  run = gke.GkeRun(placed(topologies, places, max_restarts=7, **more), **options)
  run.check()
  return run.documents(PUBLIC, SECRETS)


def by_name(documents):
  return {(each["kind"], each["metadata"]["name"]): each for each in documents}


@pytest.fixture
def models():
  """The API's own, which take half a second to import: so only who tests with them does."""
  return importlib.import_module("kubeflow_trainer_api.models")


@pytest.fixture(scope="module")
def one():
  return by_name(rendered(["v5p:2x2x2", "v6e:2x2"])[""])


@pytest.fixture(scope="module")
def two():
  options = OPTIONS | {"shard_addresses": ADDRESSES}
  return rendered(["v6e:4x4", "v6e:2x2"], ("east=0", "west=1"), options, spot=True)


def test_every_document_fits_its_model_and_has_no_field_beside_it(two, models):
  """The models drop what they do not know, so that only what fits comes back whole."""
  of_kind = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "ConfigMap": models.IoK8sApiCoreV1ConfigMap,
    "Secret": models.IoK8sApiCoreV1Secret,
    "Service": models.IoK8sApiCoreV1Service,
  }
  assert {each["kind"] for documents in two.values() for each in documents} == set(of_kind)
  for documents in two.values():
    for each in documents:
      again = of_kind[each["kind"]].from_dict(each).to_dict()
      assert again == each, each["metadata"]["name"]


def test_the_models_refuse_what_does_not_fit(one, models):
  """The test above can fail."""
  wrong = json.loads(json.dumps(one["JobSet", "run-learner-0"]))
  wrong["spec"]["replicatedJobs"][0]["template"]["spec"]["backofLimit"] = 1
  assert models.JobsetV1alpha2JobSet.from_dict(wrong).to_dict() != wrong
  wrong["spec"]["failurePolicy"]["maxRestarts"] = "many"
  with pytest.raises(ValueError, match="maxRestarts"):
    models.JobsetV1alpha2JobSet.from_dict(wrong)


def test_an_island_restarts_alone_and_preemption_is_not_counted(one):
  jobset = one["JobSet", "run-learner-0"]
  policy = jobset["spec"]["failurePolicy"]
  assert policy["maxRestarts"] == 7
  (rule,) = policy["rules"]
  (replicated,) = jobset["spec"]["replicatedJobs"]
  job = replicated["template"]["spec"]
  assert replicated["replicas"] == 1 and job["completions"] == job["parallelism"] == 2
  assert job["completionMode"] == "Indexed" and job["backoffLimit"] == 0
  disrupted, asked = job["podFailurePolicy"]["rules"]
  assert disrupted == {
    "action": "FailJob",
    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
  }
  assert asked["action"] == "FailJob" and asked["onExitCodes"]["values"] == [143]
  # What that makes the Job fail of, and nothing else, is not counted.
  assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
  assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
  assert job["template"]["spec"]["restartPolicy"] == "Never"  # as podFailurePolicy demands


def test_hosts_of_an_island_meet_at_host_0_on_one_slice(one):
  jobset = one["JobSet", "run-learner-0"]
  (replicated,) = jobset["spec"]["replicatedJobs"]
  pod = replicated["template"]["spec"]["template"]["spec"]
  (container,) = pod["containers"]
  # <jobset>-<replicated job>-<job's index>-<pod's index>.<jobset>, as JobSet names pods
  where = f"run-learner-0-{replicated['name']}-0-0.run-learner-0.default.svc.cluster.local"
  assert f"--hosts=tcp://{where}:7001" in container["command"]
  assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": 8080}
  assert "--http=0.0.0.0:8080" in container["command"]
  assert "--host=$(JOB_COMPLETION_INDEX)" in container["command"]
  assert container["resources"]["limits"] == {"google.com/tpu": 4}
  assert pod["serviceAccountName"] == "trainer"
  assert "securityContext" not in container, "Autopilot refuses privileged containers"
  # An island whose chips cannot be opened fails, instead of training on its host's CPU.
  assert container["env"] == [{"name": "JAX_PLATFORMS", "value": "tpu,cpu"}]
  (shard, *_) = one["JobSet", "run-shards"]["spec"]["replicatedJobs"]
  assert "env" not in shard["template"]["spec"]["template"]["spec"]["containers"][0]
  assert pod["nodeSelector"] == {
    "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
    "cloud.google.com/gke-tpu-topology": "2x2x2",
  }
  exclusive = "alpha.jobset.sigs.k8s.io/exclusive-topology"
  assert jobset["metadata"]["annotations"] == {exclusive: "cloud.google.com/gke-nodepool"}
  alone = one["JobSet", "run-learner-1"]
  assert "annotations" not in alone["metadata"]
  pod = alone["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
  assert not any(word.startswith("--host") for word in pod["containers"][0]["command"])


def test_a_shard_restarts_alone_under_its_name(one):
  jobset = one["JobSet", "run-shards"]
  assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 0}, "never all of them at once"
  names = [each["name"] for each in jobset["spec"]["replicatedJobs"]]
  assert names == ["shard-0", "shard-1"]
  for shard, each in enumerate(jobset["spec"]["replicatedJobs"]):
    job = each["template"]["spec"]
    assert job["backoffLimit"] == 7 and job["podReplacementPolicy"] == "Failed"
    assert [rule["action"] for rule in job["podFailurePolicy"]["rules"]] == ["Ignore"] * 2
    command = job["template"]["spec"]["containers"][0]["command"]
    assert f"--shard={shard}" in command
    names = [f"run-shards-shard-{s}-0-0.run-shards.default.svc.cluster.local" for s in (0, 1)]
    assert f"--syncers=tcp://{names[0]}:7000,tcp://{names[1]}:7000" in command
    container = job["template"]["spec"]["containers"][0]
    assert "livenessProbe" in container
    asked = {"cpu": "8", "memory": "32Gi"}
    assert container["resources"] == {"requests": asked, "limits": asked}


def pods_of(documents):
  jobsets = [each for each in documents if each["kind"] == "JobSet"]
  jobs = [job["template"]["spec"] for each in jobsets for job in each["spec"]["replicatedJobs"]]
  return [job["template"] for job in jobs]


def test_pods_mount_what_their_cluster_has(two):
  """The names agree, and none can write its config or keys."""
  for documents in two.values():
    there = by_name(documents)
    for pod in pods_of(documents):
      (container,) = pod["spec"]["containers"]
      volumes = {each.pop("name"): each for each in json.loads(json.dumps(pod["spec"]["volumes"]))}
      assert volumes.pop("work") == {"persistentVolumeClaim": {"claimName": "work"}}
      for each in volumes.values():
        config, secret = each.get("configMap", {}), each.get("secret", {})
        named = ("ConfigMap", config.get("name")), ("Secret", secret.get("secretName"))
        assert any(each in there for each in named)
      mounts = {each["name"]: each.get("readOnly", False) for each in container["volumeMounts"]}
      assert mounts == {"work": False, **dict.fromkeys(volumes, True)}


def test_each_shard_is_on_another_machine(one):
  shards = pods_of([one["JobSet", "run-shards"]])
  for pod in shards:
    ((_, (rule,)),) = pod["spec"]["affinity"]["podAntiAffinity"].items()
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    for each in rule["labelSelector"]["matchExpressions"]:
      assert each["operator"] == "In"
      assert {pod["metadata"]["labels"][each["key"]] for pod in shards} == set(each["values"])


def test_each_cluster_gets_the_keys_of_its_own_roles(two):
  east, west = by_name(two["east"]), by_name(two["west"])
  of = lambda found: {name for kind, name in found if kind == "Secret"}
  assert of(west) == {"run-learner-1-key"}
  shards = {"run-syncer-0-key", "run-syncer-1-key"}
  assert of(east) == {"run-learner-0-key", "run-evaluator-key"} | shards
  for pod in (each["spec"] for found in two.values() for each in pods_of(found)):
    (secret,) = [v["secret"] for v in pod["volumes"] if "secret" in v]
    assert secret["defaultMode"] == 0o400, "a role refuses a key that others may read"
    assert "fsGroup" not in pod.get("securityContext", {}), "which would let a group read it"


def test_islands_elsewhere_reach_the_shards_at_their_addresses(two):
  east, west = by_name(two["east"]), by_name(two["west"])
  for shard, address in enumerate(ADDRESSES):
    service = east["Service", f"run-syncer-{shard}"]
    assert service["spec"]["loadBalancerIP"] == address
    kind = service["metadata"]["annotations"]["networking.gke.io/load-balancer-type"]
    assert kind == "Internal", "else all the world reaches it"
    job = east["JobSet", "run-shards"]["spec"]["replicatedJobs"][shard]["template"]["spec"]
    labels = job["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
  assert not any(kind == "Service" for kind, _ in west)

  def syncers(jobset):
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (found,) = [w for w in pod["containers"][0]["command"] if w.startswith("--syncers=")]
    return found

  far = syncers(west["JobSet", "run-learner-1"])
  assert far == "--syncers=tcp://10.0.0.1:7000,tcp://10.0.0.2:7000"
  assert "run-shards-shard-0-0-0.run-shards" in syncers(east["JobSet", "run-learner-0"])


def test_spot_islands_select_spot_nodes_and_shards_do_not(two):
  east = by_name(two["east"])
  text = json.dumps(east["JobSet", "run-learner-0"])
  assert text.count("cloud.google.com/gke-spot") == 2, "selector and toleration"
  assert "gke-spot" not in json.dumps(east["JobSet", "run-shards"])
  pod = east["JobSet", "run-learner-0"]["spec"]["replicatedJobs"][0]["template"]["spec"]
  assert pod["template"]["spec"]["terminationGracePeriodSeconds"] == 20


def test_the_config_that_roles_read_is_whole(one):
  text = one["ConfigMap", "run-config"]["data"]["config.json"]
  config = from_dict(json.loads(text))
  assert config.islands.island(0).hosts == 2 and config.checkpoint.path == "gs://bucket/run"


def test_secrets_are_never_shown(one):
  shown = json.dumps([gke.redacted(each) for each in one.values()])
  assert "secret of" not in shown and "(19 bytes, not shown)" in shown
  assert "(missing: ddiloco keys makes it)" in shown, "of learner-1"
  assert "secret of" in json.dumps(list(one.values()))


def test_yaml_says_the_same(one):
  text = as_yaml(list(one.values()))
  assert list(yaml.safe_load_all(text)) == list(one.values())
  assert "&id" not in text and "config.json: |" in text, "for people"
  # kubectl takes them for a number and for true unless they are quoted.
  assert as_yaml([{"claimName": "1e3", "run": "y"}]) == "claimName: '1e3'\nrun: 'y'\n"


@pytest.mark.parametrize(
  ("changed", "places", "said"),
  [
    ({"claim": ""}, (), "--claim"),
    ({"namespace": ""}, (), "--namespace"),  # of a variable that is not set: a run was made
    ({"cluster_domain": ""}, (), "--cluster_domain"),
    ({}, ("a=0", "b=1"), "--shard_addresses"),
    ({"shard_addresses": ("10.0.0.1",)}, (), "--shard_addresses"),
    ({"shard_addresses": ("10.0.0.1", "10.0.0.1")}, (), "--shard_addresses"),
    ({"shard_addresses": ("10.0.0.1", "10.0.0.2:7000")}, (), "--shard_addresses"),
  ],
)
def test_what_is_missing_is_named(changed, places, said):
  with pytest.raises(ConfigError, match=f"{said} = .*Fix: "):
    rendered(["v6e:2x2"] * 2, places, OPTIONS | changed)


def test_a_name_that_is_too_long_for_node_pools_is_refused():
  """GKE takes 40 characters: 30 and "-learner-0", but not 30 and "-learner-10"."""
  many = placed(["v6e:2x2"] * 11)
  gke.GkeRun(dataclasses.replace(many, name="n" * 29), "work").check()
  with pytest.raises(ConfigError, match=r"^--name = .*at most 40 characters.*Fix: use at most 29"):
    gke.GkeRun(dataclasses.replace(many, name="n" * 30), "work").check()


def test_node_pools_are_those_of_the_slices():
  places = ("gke_proj_us-east5_one=0", "mine=1")
  first, second = gke.GkeRun(placed(["v6e:4x4", "v6e:2x2"], places, spot=True), "work").node_pools()
  assert "--project=proj --cluster=one --location=us-east5" in first
  assert "--machine-type=ct6e-standard-4t --num-nodes=4 --tpu-topology=4x4 --spot" in first
  assert "--cluster=CLUSTER" in second and "topology" not in second


def test_hosts_of_a_tpu7x_slice_are_placed_by_a_policy_which_comes_first():
  places = ("gke_proj_us-central1-c_one=0", "gke_proj_us-central1_two=1-2")
  topologies = ["tpu7x:2x2x2", "tpu7x:2x2x4", "tpu7x:2x2x1"]
  run = gke.GkeRun(placed(topologies, places), "work", shard_addresses=("10.0.0.1", "10.0.0.2"))
  policy, pool, second_policy, second_pool, single = run.node_pools()
  made, how = "gcloud compute resource-policies create workload-policy", "--type=HIGH_THROUGHPUT"
  where = "--project=proj --region=us-central1"
  assert policy == f"{made} run-learner-0 {where} {how} --accelerator-topology=2x2x2"
  assert second_policy == f"{made} run-learner-1 {where} {how} --accelerator-topology=2x2x4"
  for text, name, hosts in ((pool, "run-learner-0", 2), (second_pool, "run-learner-1", 4)):
    assert f"--num-nodes={hosts} --placement-policy={name}" in text and "tpu-topology" not in text
  assert "--num-nodes=1" in single and "policy" not in single
  (home, _) = run.documents({}, {}).values()
  jobset = by_name(home)["JobSet", "run-learner-0"]
  island = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
  pod = island["template"]["spec"]
  selected = pod["nodeSelector"]
  assert selected["cloud.google.com/gke-tpu-accelerator"] == "tpu7x"
  assert selected["cloud.google.com/gke-tpu-topology"] == "2x2x2" and island["completions"] == 2
  assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}, "chips, not devices"


def test_an_island_of_gpus_beside_one_of_tpus(models):
  made = rendered(["h100:8", "v6e:2x2"], spot=True)[""]
  gpus, tpus = (by_name(made)["JobSet", f"run-learner-{m}"] for m in (0, 1))
  job = gpus["spec"]["replicatedJobs"][0]["template"]["spec"]
  pod = job["template"]["spec"]
  (container,) = pod["containers"]
  assert pod["nodeSelector"] == {
    "cloud.google.com/gke-accelerator": "nvidia-h100-80gb",
    "cloud.google.com/gke-spot": "true",
  }
  assert container["resources"]["limits"] == {"nvidia.com/gpu": 8} and job["completions"] == 1
  variables = {each["name"]: each["value"] for each in container["env"]}
  assert variables == {
    "JAX_PLATFORMS": "cuda,cpu",
    "LD_LIBRARY_PATH": "/usr/local/nvidia/lib64",
  }
  mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
  (shared,) = (each for each in pod["volumes"] if each["name"] == mounts["/dev/shm"])
  assert shared["emptyDir"] == {"medium": "Memory"}
  (beside,) = tpus["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
    "containers"
  ]
  assert beside["resources"]["limits"] == {"google.com/tpu": 4}
  assert "/dev/shm" not in json.dumps(beside)
  model = models.JobsetV1alpha2JobSet.from_dict(gpus)
  assert model.to_dict() == gpus
  placement = placed(["h100:8", "h200:8"], ("gke_proj_us-east5_one=0", "mine=1"), spot=True)
  first, second = gke.GkeRun(placement, "work").node_pools()
  how = "--accelerator=type=nvidia-h100-80gb,count=8,gpu-driver-version=latest --spot"
  assert f"--machine-type=a3-highgpu-8g --num-nodes=1 {how}" in first
  assert "type=nvidia-h200-141gb,count=8" in second and "topology" not in first + second


def test_a_cluster_s_answer_is_read():
  jobs = lambda name, count, **status: {
    "kind": "JobSet",
    "metadata": {"name": name},
    "spec": {"replicatedJobs": [{"name": "host"}] * count},
    **({"status": status} if status else {}),
  }
  of = lambda name: {"metadata": {"name": "p", "labels": {JOBSET: name}}}
  ready = [{"name": "host", "ready": 1, "succeeded": 0}]
  conditions = [
    {"type": "StartupPolicyCompleted", "status": "True", "message": "all started"},
    {"type": "Failed", "status": "True", "message": "reached maxRestarts"},
  ]
  mixed = [{"ready": 1}, {"succeeded": 1}, {"ready": 0}]
  listed = [
    jobs("run-learner-0", 1, restarts=3, restartsCountTowardsMax=1, replicatedJobsStatus=ready),
    jobs("run-none", 2),
    jobs("run-shards", 3, replicatedJobsStatus=mixed),
    jobs("run-evaluator", 1, terminalState="Failed", conditions=conditions),
    jobs("run-over", 1, terminalState="Completed"),
    *({"kind": "Pod", **of(name)} for name in ("run-learner-0", "run-shards", "run-shards")),
  ]
  assert [str(each) for each in gke.states(listed, ["run-learner-0", "run-learner-1"])] == [
    "run-learner-0: 1 of 1 ready, 3 restarts, 1 of them failures",
    "run-learner-1: is not there",
    "run-none: 0 of 2 ready (no pod)",
    "run-shards: 2 of 3 ready",
    "run-evaluator: Failed (reached maxRestarts)",
    "run-over: Completed",
  ]


JOBSET = "jobset.sigs.k8s.io/jobset-name"
NO_NODE = {
  "type": "PodScheduled",
  "status": "False",
  "reason": "Unschedulable",
  "message": "0/3 nodes are available:\n3 Insufficient google.com/tpu.",
}
NO_IMAGE = {"reason": "ImagePullBackOff", "message": "Back-off pulling image i:1"}


@pytest.mark.parametrize(
  ("status", "said"),
  [
    ({}, ""),
    ({"conditions": [NO_NODE | {"status": "True"}]}, ""),
    (
      {"conditions": [{"type": "Ready", "status": "False"}, NO_NODE]},
      "pod p: Unschedulable: 0/3 nodes are available: 3 Insufficient google.com/tpu.",
    ),
    ({"containerStatuses": [{"state": {"running": {"startedAt": "now"}}}]}, ""),
    (
      {"containerStatuses": [{"state": {"waiting": NO_IMAGE}}]},
      "pod p: ImagePullBackOff: Back-off pulling image i:1",
    ),
    (
      {"containerStatuses": [{"state": {"waiting": {"reason": "ContainerCreating"}}}]},
      "pod p: ContainerCreating",
    ),
  ],
)
def test_why_a_pod_waits_is_read(status, said):
  metadata, spec = {"name": "run-learner-0"}, {"replicatedJobs": [{}]}
  labels = {JOBSET: "run-learner-0"}
  jobset = {"kind": "JobSet", "metadata": metadata, "spec": spec}
  pod = {"kind": "Pod", "metadata": {"name": "p", "labels": labels}, "status": status}
  (state,) = gke.states([jobset, pod], [])
  assert state.reason == said
