// Tests the values read from each launcher's variables: rank, world, ranks of this machine, and the
// rendezvous.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "runtime/util/error.h"
#include "tests/trainer/files.h"
#include "tests/trainer/run_options.h"
#include "trainer/cli/launcher.h"

namespace gradwire::testing {
namespace {

using Variables = std::map<std::string, std::string>;

// Returns the detected launch as text: "1/4 local 1/2 tcp://node0:29500", "none", or "error: ...". Replaces a
// port derived from a job's id by "*".
std::string found_in(const Variables& variables) {
  try {
    const std::optional<Launch> launch = launched_with(variables);
    if (!launch) return "none";
    std::string place = launch->world == 1 ? "alone" : rendezvous_for(*launch, "");
    const size_t colon = place.rfind(':');
    if (launch->world > 1) {
      const int port = std::atoi(place.c_str() + colon + 1);
      const auto given = variables.find("MASTER_PORT");
      const bool chosen = given != variables.end() && given->second == std::to_string(port);
      if (port >= 20'000 && port < 30'000 && !chosen && !variables.contains("MASTER_ADDR"))
        place.replace(colon + 1, place.npos, "*");
    }
    return fmt::format("{}/{} local {}/{} {}", launch->rank, launch->world, launch->local_rank,
                       launch->local_world, place);
  } catch (const BadInput& error) {
    return fmt::format("error: {}", error.what());
  }
}

struct Environment {
  const char* name;
  Variables variables;
  const char* expected;  // the result as text; for an error, a part of the error's text
};

Variables joined(Variables more, const Variables& base) {
  more.insert(base.begin(), base.end());
  return more;
}

// Returns the variables of rank 1 of 2, the last of `here` ranks on this machine.
Variables ranks_of(const std::string& prefix, const std::string& here) {
  return {{prefix + "RANK", "1"},
          {prefix + "SIZE", "2"},
          {prefix + "LOCAL_RANK", here == "2" ? "1" : "0"},
          {prefix + "LOCAL_SIZE", here}};
}

const Variables kSlurmStep = {{"SLURM_JOB_ID", "77"},
                              {"SLURM_STEP_ID", "0"},
                              {"SLURM_PROCID", "3"},
                              {"SLURM_STEP_NUM_TASKS", "4"},
                              {"SLURM_LOCALID", "1"},
                              {"SLURM_NODEID", "1"},
                              {"SLURM_STEP_NUM_NODES", "2"},
                              {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
                              {"SLURM_STEP_NODELIST", "n[3-4]"},
                              {"SLURM_JOB_NODELIST", "n[1-4]"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                            {"PMIX_NAMESPACE", "prterun-n1-42@1"}};
const Variables kOpenMpiHere = {{"OMPI_COMM_WORLD_RANK", "1"},
                                {"OMPI_COMM_WORLD_SIZE", "2"},
                                {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                {"PMIX_NAMESPACE", "prterun-n1-42@1"}};
const Variables kHydra = {
    {"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}, {"MPI_LOCALNRANKS", "1"}};
const Variables kHydraHere = {{"PMI_RANK", "1"},
                              {"PMI_SIZE", "2"},
                              {"MPI_LOCALRANKID", "1"},
                              {"MPI_LOCALNRANKS", "2"},
                              {"PMI_PORT", "n1:4"}};
const Variables kFlux = {{"FLUX_TASK_RANK", "1"}, {"FLUX_JOB_SIZE", "2"}, {"FLUX_TASK_LOCAL_ID", "0"}};
const Variables kTorchrun = {{"RANK", "1"},
                             {"WORLD_SIZE", "4"},
                             {"LOCAL_RANK", "1"},
                             {"LOCAL_WORLD_SIZE", "2"},
                             {"MASTER_ADDR", "n1"},
                             {"MASTER_PORT", "29500"},
                             {"TORCHELASTIC_RUN_ID", "none"},
                             {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
const Variables kPod = {
    {"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "job-master-0"}, {"MASTER_PORT", "23456"}};
const Variables kByHand = {{"RANK", "1"}, {"WORLD_SIZE", "2"}};
constexpr const char* kService = "tcp://10.96.0.7:2222";  // Kubernetes' variable for a service named "master"

const std::vector<Environment> kEnvironments = {
    // Slurm
    {"srun on two nodes", kSlurmStep, "3/4 local 1/2 tcp://n3:*"},
    {"srun on one node",
     joined({{"SLURM_STEP_NODELIST", "n3"},
             {"SLURM_NODEID", "0"},
             {"SLURM_STEP_TASKS_PER_NODE", "4"},
             {"SLURM_LOCALID", "3"}},
            kSlurmStep),
     "3/4 local 3/4 tcp://127.0.0.1:*"},
    {"srun with uneven nodes", joined({{"SLURM_STEP_TASKS_PER_NODE", "1,3"}}, kSlurmStep),
     "3/4 local 1/3 tcp://n3:*"},
    {"srun with MASTER_ADDR", joined({{"MASTER_ADDR", "n4"}}, kSlurmStep), "3/4 local 1/2 tcp://n4:29500"},
    {"srun with MASTER_PORT", joined({{"MASTER_PORT", "4000"}}, kSlurmStep), "3/4 local 1/2 tcp://n3:4000"},
    {"srun --mpi=pmi2", joined({{"PMI_RANK", "3"}, {"PMI_SIZE", "4"}}, kSlurmStep),
     "3/4 local 1/2 tcp://n3:*"},
    {"srun --mpi=pmix", joined({{"PMIX_RANK", "3"}, {"PMIX_NAMESPACE", "slurm.pmix.77.0"}}, kSlurmStep),
     "3/4 local 1/2 tcp://n3:*"},
    {"an older srun, without counts",
     {{"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_STEP_NODELIST", "gpu[03-04]"}},
     "1/2 local -1/0 tcp://gpu03:*"},
    {"a batch script", {{"SLURM_JOB_ID", "77"}, {"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}}, "none"},
    {"srun of one task",
     {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_STEP_TASKS_PER_NODE", "1"}},
     "0/1 local -1/1 alone"},
    {"a heterogeneous step's second part",
     joined({{"SLURM_HET_SIZE", "2"},
             {"SLURM_HET_JOB_ID", "70"},
             {"SLURM_NODEID", "2"},
             {"SLURM_JOB_NODELIST_HET_GROUP_0", "a[1-2]"}},
            kSlurmStep),
     "3/4 local 1/2 tcp://a1:*"},
    {"the same with a count of its part only",
     joined({{"SLURM_HET_SIZE", "2"}, {"SLURM_PROCID", "5"}}, kSlurmStep),
     "error: the environment is inconsistent: SLURM_PROCID=5 SLURM_STEP_NUM_TASKS=4 (Slurm); ranks are 0 .. "
     "world - 1. Slurm counts "
     "the tasks of each part of a heterogeneous job: set RANK"},
    {"variables by hand inside a step", joined(kByHand, kSlurmStep), "1/2 local -1/0 tcp://n3:*"},
    {"a local rank beyond Slurm's count", joined({{"SLURM_LOCALID", "2"}}, kSlurmStep),
     "error: the environment is inconsistent: SLURM_LOCALID=2"},
    // Open MPI
    {"mpirun on one machine", kOpenMpiHere, "1/2 local 1/2 tcp://127.0.0.1:*"},
    {"mpirun on two machines", kOpenMpi, "error: started by mpirun (Open MPI)"},
    {"mpirun on two machines with MASTER_ADDR", joined({{"MASTER_ADDR", "n1"}}, kOpenMpi),
     "1/2 local 0/1 tcp://n1:29500"},
    {"mpirun in an allocation, first node",
     joined({{"SLURM_JOB_ID", "77"}, {"SLURM_JOB_NODELIST", "n[1-2]"}}, kOpenMpi),
     "1/2 local 0/1 tcp://n1:*"},
    {"mpirun in an allocation, below a daemon's step",
     joined(kOpenMpi, joined({{"SLURM_STEP_NODELIST", "n2"}, {"SLURM_JOB_NODELIST", "n[1-2]"}}, kSlurmStep)),
     "1/2 local 0/1 tcp://n1:*"},
    {"mpirun on one node of an allocation",
     joined({{"SLURM_JOB_ID", "77"}, {"SLURM_JOB_NODELIST", "n1,n2"}}, kOpenMpiHere),
     "1/2 local 1/2 tcp://127.0.0.1:*"},
    {"mpirun and a service named master", joined({{"MASTER_PORT", kService}}, kOpenMpiHere),
     "1/2 local 1/2 tcp://127.0.0.1:*"},
    {"mpirun with a local rank beyond its count", joined({{"OMPI_COMM_WORLD_LOCAL_RANK", "2"}}, kOpenMpiHere),
     "error: the environment is inconsistent: OMPI_COMM_WORLD_LOCAL_RANK=2"},
    // MPICH, Intel MPI
    {"Hydra on one machine", kHydraHere, "1/2 local 1/2 tcp://127.0.0.1:*"},
    {"Hydra on two machines", kHydra, "error: started by mpirun (MPICH)"},
    {"Hydra in an allocation",
     joined(kHydra, joined({{"SLURM_STEP_NODELIST", "n2"}, {"SLURM_JOB_NODELIST", "n[1-2]"}}, kSlurmStep)),
     "1/2 local 0/1 tcp://n1:*"},
    {"Hydra on one node of an allocation", joined(kHydraHere, kSlurmStep), "1/2 local 1/2 tcp://127.0.0.1:*"},
    {"Hydra without local ranks", {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}, "error: started by mpirun (MPICH)"},
    // MVAPICH, jsrun, Flux
    {"mpirun_rsh on one machine", ranks_of("MV2_COMM_WORLD_", "2"), "1/2 local 1/2 tcp://127.0.0.1:*"},
    {"mpirun_rsh on two machines", ranks_of("MV2_COMM_WORLD_", "1"),
     "error: started by mpirun (MVAPICH) as one of 2 processes"},
    {"jsrun on one machine", ranks_of("JSM_NAMESPACE_", "2"), "1/2 local 1/2 tcp://127.0.0.1:*"},
    {"jsrun on two machines", joined({{"MASTER_ADDR", "n1"}}, ranks_of("JSM_NAMESPACE_", "1")),
     "1/2 local 0/1 tcp://n1:29500"},
    {"Flux", kFlux, "error: started by Flux as one of 2 processes"},
    {"Flux with PMI and MASTER_ADDR",
     joined({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MASTER_ADDR", "n1"}}, kFlux),
     "1/2 local -1/0 tcp://n1:29500"},
    {"Flux in a Slurm step of its brokers",
     joined(kFlux, {{"SLURM_PROCID", "3"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_JOB_NODELIST", "n[3-6]"}}),
     "1/2 local 0/0 tcp://n3:*"},
    // PRRTE and Kubernetes
    {"prun in a step of one task",
     {{"PMIX_RANK", "1"}, {"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}},
     "error: each process would train alone: PMIX_RANK=1"},
    {"prun with what it lacks",
     {{"PMIX_RANK", "1"}, {"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "n1"}},
     "1/2 local -1/0 tcp://n1:29500"},
    {"PyTorchJob", kPod, "1/2 local -1/0 tcp://job-master-0:23456"},
    {"PyTorchJob with one rank in each pod", joined({{"LOCAL_RANK", "0"}, {"LOCAL_WORLD_SIZE", "1"}}, kPod),
     "1/2 local 0/1 tcp://job-master-0:23456"},
    {"PyTorchJob beside a service named master", joined({{"MASTER_PORT", kService}}, kPod),
     "error: MASTER_PORT=tcp://10.96.0.7:2222 in the environment is not a port; Kubernetes sets the variable "
     "for "
     "a service named 'master'. Set MASTER_PORT"},
    {"one pod beside a service named master",
     {{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_PORT", kService}},
     "0/1 local -1/0 alone"},
    {"the MPI operator, one worker", joined({{"OMPI_MCA_ess_base_jobid", "5"}}, kOpenMpiHere),
     "1/2 local 1/2 tcp://127.0.0.1:*"},
    {"the MPI operator, with an address",
     joined({{"MASTER_ADDR", "job-worker-0.job"}, {"MASTER_PORT", "4000"}}, kOpenMpi),
     "1/2 local 0/1 tcp://job-worker-0.job:4000"},
    // torchrun
    {"torchrun", kTorchrun, "1/4 local 1/2 tcp://n1:29600"},
    {"torchrun on one machine", joined({{"LOCAL_WORLD_SIZE", "4"}}, kTorchrun),
     "1/4 local 1/4 tcp://127.0.0.1:29600"},
    {"torchrun in a Slurm step of one task",
     joined(kTorchrun, {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}}),
     "1/4 local 1/2 tcp://n1:29600"},
    {"torchrun without its own store", joined({{"TORCHELASTIC_USE_AGENT_STORE", "False"}}, kTorchrun),
     "1/4 local 1/2 tcp://n1:29500"},
    {"a local rank beyond torchrun's count", joined({{"LOCAL_RANK", "2"}}, kTorchrun),
     "error: the environment is inconsistent: LOCAL_RANK=2 LOCAL_WORLD_SIZE=2"},
    {"more ranks here than anywhere", joined({{"LOCAL_WORLD_SIZE", "5"}}, kTorchrun),
     "error: the environment is inconsistent: LOCAL_RANK=1"},
    // By hand
    {"nothing", {}, "none"},
    {"variables by hand", joined({{"MASTER_ADDR", "n1"}}, kByHand), "1/2 local -1/0 tcp://n1:29500"},
    {"an IPv6 address", joined({{"MASTER_ADDR", "fd00::1"}}, kByHand),
     "1/2 local -1/0 tcp://[fd00::1]:29500"},
    {"an IPv6 address in brackets", joined({{"MASTER_ADDR", "[::1]"}, {"MASTER_PORT", "4000"}}, kByHand),
     "1/2 local -1/0 tcp://[::1]:4000"},
    {"no address", kByHand, "error: started by the environment as one of 2 processes"},
    {"a port that is none", joined({{"MASTER_ADDR", "n1"}, {"MASTER_PORT", "70000"}}, kByHand),
     "error: MASTER_PORT=70000"},
};

TEST(Launchers, ReadsRanksAndRendezvousFromEachEnvironment) {
  for (const Environment& e : kEnvironments) {
    const std::string found = found_in(e.variables), expected = e.expected;
    if (expected.starts_with("error: ")) {
      EXPECT_TRUE(found.starts_with(expected)) << e.name << ": " << found;
    } else {
      EXPECT_EQ(found, expected) << e.name;
    }
  }
  EXPECT_GE(kEnvironments.size(), 40u);
}

TEST(Launchers, RefuseARankAboveZeroWithoutANumberOfRanks) {
  for (const char* rank :
       {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK",
        "FLUX_TASK_RANK", "SLURM_PROCID", "PMIX_RANK", "PALS_RANKID", "MPT_MPI_RANK", "ALPS_APP_PE"}) {
    const Variables place = {{"MASTER_ADDR", "n1"}, {"MASTER_PORT", "4000"}};
    EXPECT_EQ(found_in(joined({{rank, "1"}}, place)),
              fmt::format("error: each process would train alone: {0}=1 in the environment, but no variable "
                          "has the number of ranks; set RANK to 1, WORLD_SIZE and MASTER_ADDR, or unset {0}",
                          rank));
    EXPECT_EQ(found_in(joined({{rank, "0"}}, place)), "none") << rank;
  }
}

TEST(Launchers, RanksOfOneMpirunShareARendezvousAcrossNodes) {
  const Variables first = joined({{"SLURM_JOB_ID", "77"}, {"SLURM_JOB_NODELIST", "n[1-2]"}}, kOpenMpi);
  Variables second = joined({{"SLURM_STEP_ID", "0"},
                             {"SLURM_STEP_NODELIST", "n2"},
                             {"SLURM_STEP_NUM_TASKS", "1"},
                             {"SLURM_PROCID", "0"}},
                            first);
  EXPECT_EQ(launched_with(first)->rendezvous, launched_with(second)->rendezvous);
  second["PMIX_NAMESPACE"] = "prterun-n1-43@1";
  EXPECT_NE(launched_with(first)->rendezvous, launched_with(second)->rendezvous)
      << "another mpirun of the same job";
}

TEST(Launchers, IgnoresErrorsInUnneededVariables) {
  const std::optional<Launch> launch = launched_with(joined({{"MASTER_PORT", kService}}, kPod));
  ASSERT_TRUE(launch);
  EXPECT_EQ(rendezvous_for(*launch, "file:///shared/meet"), "file:///shared/meet");
}

TEST(Launchers, ParsesSlurmsCountsPerNode) {
  EXPECT_EQ(count_of_node("2(x3),1", 0), 2);
  EXPECT_EQ(count_of_node("2(x3),1", 2), 2);
  EXPECT_EQ(count_of_node("2(x3),1", 3), 1);
  EXPECT_EQ(count_of_node("2(x3),1", 4), 0);
  EXPECT_EQ(count_of_node("4(x2)", 5), 4) << "in a later part of a heterogeneous job";
  EXPECT_EQ(count_of_node("", 0), 0);
  EXPECT_EQ(count_of_node("many", 0), 0);
}

TEST(Launchers, ProcessesDivideTheCoresUnlessTheyAreBound) {
  const auto launch = [](const char* launcher, int local_world) {
    Launch made;
    made.launcher = launcher;
    made.local_world = local_world;
    return made;
  };
  EXPECT_EQ(threads_of_share(launch("torchrun", 4), 16, 16, 0), 4);
  EXPECT_EQ(threads_of_share(launch("torchrun", 4), 8, 16, 0), 2) << "one cpuset for all";
  EXPECT_EQ(threads_of_share(launch("Slurm", 4), 16, 16, 0), 4) << "not bound";
  EXPECT_EQ(threads_of_share(launch("Slurm", 4), 4, 16, 0), 4) << "bound";
  EXPECT_EQ(threads_of_share(launch("mpirun (Open MPI)", 4), 1, 16, 0), 1) << "bound to a core";
  EXPECT_EQ(threads_of_share(launch("mpirun (Open MPI)", 4), 8, 16, 0), 4) << "two are bound to each package";
  EXPECT_EQ(threads_of_share(launch("torchrun", 2), 64, 64, 6), 3) << "a container's quota";
  EXPECT_EQ(threads_of_share(launch("torchrun", 8), 4, 4, 2), 1);
}

TEST(Launcher, RecognizesEveryLauncher) {
  EXPECT_FALSE(launched_with({}));
  EXPECT_FALSE(launched_with({{"SLURM_NTASKS", "4"}, {"SLURM_PROCID", "0"}}))
      << "a batch script has not launched ranks";
  auto torchrun = launched_with({{"RANK", "2"},
                                 {"WORLD_SIZE", "4"},
                                 {"LOCAL_RANK", "1"},
                                 {"LOCAL_WORLD_SIZE", "2"},
                                 {"TORCHELASTIC_RUN_ID", "none"}});
  ASSERT_TRUE(torchrun);
  EXPECT_EQ(torchrun->launcher, "torchrun");
  EXPECT_EQ(torchrun->rank, 2);
  EXPECT_EQ(torchrun->world, 4);
  EXPECT_EQ(torchrun->local_rank, 1);
  EXPECT_EQ(torchrun->local_world, 2);
  EXPECT_EQ(torchrun->rendezvous, "") << "no rendezvous is given";
  EXPECT_EQ(launched_with({{"RANK", "0"}, {"WORLD_SIZE", "2"}})->launcher, "the environment");
  EXPECT_EQ(launched_with({{"SLURM_STEP_NUM_TASKS", "8"}, {"SLURM_PROCID", "7"}})->world, 8);
  EXPECT_EQ(launched_with({{"OMPI_COMM_WORLD_SIZE", "3"}, {"OMPI_COMM_WORLD_RANK", "1"}})->world, 3);
  EXPECT_EQ(launched_with({{"PMI_SIZE", "2"}, {"PMI_RANK", "1"}})->launcher, "mpirun (MPICH)");
  EXPECT_EQ(launched_with({{"RANK", "0"}, {"WORLD_SIZE", "1"}})->world, 1);
  // mpirun inside a Slurm job makes srun start a daemon per node; the ranks inherit its rank number.
  auto nested = launched_with({{"OMPI_COMM_WORLD_SIZE", "8"},
                               {"OMPI_COMM_WORLD_RANK", "5"},
                               {"SLURM_STEP_NUM_TASKS", "2"},
                               {"SLURM_PROCID", "1"}});
  EXPECT_EQ(nested->rank, 5);
}

TEST(Launcher, DeterminesTheRendezvous) {
  using Map = std::map<std::string, std::string>;
  auto meet = [](Map more, const Map& ranks = {{"RANK", "0"}, {"WORLD_SIZE", "2"}}) {
    more.insert(ranks.begin(), ranks.end());
    const Launch launch = *launched_with(more);
    return launch.no_rendezvous.empty() ? launch.rendezvous : rendezvous_for(launch, "");
  };
  EXPECT_EQ(meet({{"MASTER_ADDR", "node0"}, {"MASTER_PORT", "1234"}}), "tcp://node0:1234");
  EXPECT_EQ(meet({{"MASTER_ADDR", "fd00::1"}, {"MASTER_PORT", "1234"}}), "tcp://[fd00::1]:1234");
  // torchrun's agent occupies this port with its store.
  EXPECT_EQ(meet({{"MASTER_ADDR", "a"}, {"MASTER_PORT", "29500"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}}),
            "tcp://a:29600");
  EXPECT_EQ(meet({{"MASTER_ADDR", "a"}, {"MASTER_PORT", "65500"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}}),
            "tcp://a:65400");
  EXPECT_EQ(meet({{"MASTER_ADDR", "a"}, {"MASTER_PORT", "29500"}, {"TORCHELASTIC_USE_AGENT_STORE", "False"}}),
            "tcp://a:29500");
  expect_bad_input([&] { meet({{"MASTER_ADDR", "a"}, {"MASTER_PORT", "0"}}); }, {"MASTER_PORT=0"});

  const Map slurm = {{"SLURM_PROCID", "1"},
                     {"SLURM_STEP_NUM_TASKS", "2"},
                     {"SLURM_STEP_NODELIST", "gpu[03-04]"},
                     {"SLURM_JOB_ID", "77"}};
  std::string one = meet({{"SLURM_STEP_ID", "0"}}, slurm), two = meet({{"SLURM_STEP_ID", "1"}}, slurm);
  EXPECT_TRUE(one.starts_with("tcp://gpu03:2")) << one;
  EXPECT_NE(one, two) << "two steps of a job may run at once";

  // If all ranks are on one machine, the port is not open to other machines.
  EXPECT_EQ(meet({{"MASTER_ADDR", "node0"}, {"LOCAL_WORLD_SIZE", "2"}}), "tcp://127.0.0.1:29500");
  EXPECT_EQ(meet({{"MASTER_ADDR", "node0"}, {"LOCAL_WORLD_SIZE", "1"}}), "tcp://node0:29500");
  EXPECT_TRUE(
      meet({}, {{"SLURM_PROCID", "1"}, {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_STEP_NODELIST", "gpu03"}})
          .starts_with("tcp://127.0.0.1:2"));

  const Map mpi = {{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}};
  EXPECT_TRUE(meet({{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}, mpi).starts_with("tcp://127.0.0.1:2"));
  EXPECT_EQ(meet({{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}}, mpi), "") << "rank 0 may be elsewhere";
}

TEST(Launcher, ParsesTheFirstOfSlurmsHosts) {
  for (auto [list, first] : {std::pair{"node7", "node7"},
                             {"a,b", "a"},
                             {"gpu[03-05,9],login1", "gpu03"},
                             {"n[7,9-11]", "n7"},
                             {"r[1-2]n[05-08],x", "r1n05"},
                             {"n[12]-ib", "n12-ib"},
                             {"", ""},
                             {"broken[1", "broken"}}) {
    EXPECT_EQ(first_host(list), first);
  }
}

TEST(Launcher, RejectsAWorldOfOneUnderALauncherOfMoreRanks) {
  expect_bad_input(
      [] {
        launched_with(
            {{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_PROCID", "2"}});
      },
      {"each process would train alone", "WORLD_SIZE=1", "SLURM_STEP_NUM_TASKS=4"});
  RunOptions o = synthetic();
  o.launch = launched_with({{"RANK", "2"}, {"WORLD_SIZE", "4"}});
  EXPECT_EQ(resolve(o).config.ranks(), 4);
  EXPECT_TRUE(resolve(o).config.processes);
  o.rank_count = 4;  // agrees with the launcher
  EXPECT_EQ(resolve(o).config.ranks(), 4);
  for (int ranks : {1, 2}) {
    o.rank_count = ranks;
    expect_bad_input([&] { resolve(o); }, {fmt::format("--ranks {}", ranks), "started 4 processes"});
  }
}

TEST(Launcher, RejectsContradictions) {
  expect_bad_input([] { launched_with({{"RANK", "4"}, {"WORLD_SIZE", "4"}}); }, {"RANK=4", "WORLD_SIZE=4"});
  expect_bad_input([] { launched_with({{"RANK", "0"}, {"WORLD_SIZE", "four"}}); }, {"WORLD_SIZE='four'"});
  expect_bad_input([] { launched_with({{"WORLD_SIZE", "0"}}); }, {"WORLD_SIZE=0"});
  expect_bad_input([] { launched_with({{"WORLD_SIZE", "2"}}); }, {"WORLD_SIZE=2", "not RANK"});
  expect_bad_input(
      [] {
        launched_with({{"RANK", "0"}, {"WORLD_SIZE", "2147483647"}});
      },
      {"WORLD_SIZE=2147483647", "at most 65536"});
}

}  // namespace
}  // namespace gradwire::testing
