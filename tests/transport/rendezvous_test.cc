#include "penstock/transport/rendezvous.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <atomic>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "penstock/transport/sockets.h"
#include "tests/tensor/values.h"
#include "tests/thrown.h"
#include "tests/transport/ranks.h"

namespace penstock::internal::testing {
namespace {

using Values = std::map<std::string, std::string>;

// Returns the variables of a rank, with some added or replaced.
Values with(const Values& others) {
  Values values{{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"MASTER_PORT", "29500"}};
  for (const auto& [name, value] : others) values[name] = value;
  return values;
}

RankEnvironment read(const Values& values) {
  return read_environment([&values](const char* name) -> const char* {
    const auto found = values.find(name);
    return found == values.end() ? nullptr : found->second.c_str();
  });
}

TEST(RankEnvironment, IsWhatTorchrunSets) {
  const RankEnvironment found = read({{"RANK", "5"},
                                      {"WORLD_SIZE", "8"},
                                      {"LOCAL_RANK", "1"},
                                      {"LOCAL_WORLD_SIZE", "4"},
                                      {"MASTER_ADDR", "node0.example"},
                                      {"MASTER_PORT", "29400"},
                                      {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                      {"TORCHELASTIC_RESTART_COUNT", "2"},
                                      {"GLOO_SOCKET_IFNAME", "eth1"}});
  EXPECT_EQ(found.rank, 5);
  EXPECT_EQ(found.ranks, 8);
  EXPECT_EQ(found.local_rank, 1);
  EXPECT_FALSE(found.one_machine);
  EXPECT_EQ(found.master_address, "node0.example");
  EXPECT_EQ(found.master_port, 29400);
  EXPECT_TRUE(found.agent_serves);
  EXPECT_EQ(found.attempt, 2);
  EXPECT_EQ(found.interface, "eth1");
}

TEST(RankEnvironment, HasTheTokenOfTheJob) {
  const Values launched{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "29400"}};
  const auto token = [](const Values& launcher, const Values& others) {
    Values values = launcher;
    values.insert(others.begin(), others.end());
    return read(values).job_token;
  };
  EXPECT_EQ(token(launched, {}), "");
  EXPECT_EQ(token(launched, {{"TORCHELASTIC_RUN_ID", "run"}}), "run");
  EXPECT_EQ(token(launched, {{"TORCHELASTIC_RUN_ID", "run"}, {"PENSTOCK_JOB_TOKEN", "secret"}}), "secret");
  const Values step{{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_JOB_ID", "7"}, {"SLURM_STEP_ID", "3"}};
  EXPECT_EQ(token(step, {{"SLURM_PROCID", "0"}}), "7.3");
  // With RANK set by hand, several steps may be ranks of one run.
  EXPECT_EQ(token(launched, step), "");
}

TEST(RankEnvironment, IsWhatSlurmSets) {
  const Values values{{"SLURM_PROCID", "5"},
                      {"SLURM_STEP_NUM_TASKS", "8"},
                      {"SLURM_LOCALID", "1"},
                      {"SLURM_STEP_TASKS_PER_NODE", "4(x2)"},
                      {"SLURM_STEP_NODELIST", "node[03-05,07]"},
                      {"SLURM_JOB_ID", "123456"}};
  const RankEnvironment found = read(values);
  EXPECT_EQ(found.rank, 5);
  EXPECT_EQ(found.ranks, 8);
  EXPECT_EQ(found.local_rank, 1);
  EXPECT_FALSE(found.one_machine);
  EXPECT_EQ(found.master_address, "node03");
  EXPECT_EQ(found.master_port, 23456);
  // Explicit values take precedence.
  Values named = values;
  named["MASTER_ADDR"] = "10.0.0.1";
  named["MASTER_PORT"] = "29500";
  EXPECT_EQ(read(named).master_address, "10.0.0.1");
  EXPECT_EQ(read(named).master_port, 29500);
  Values one = values;
  one["SLURM_STEP_TASKS_PER_NODE"] = "8";
  one["SLURM_STEP_NODELIST"] = "node7";
  EXPECT_TRUE(read(one).one_machine);
  EXPECT_EQ(read(one).master_address, "127.0.0.1");
  for (const auto& [list, first] :
       Values{{"a", "a"}, {"a,b", "a"}, {"n[1,3]", "n1"}, {"n[007-9],m", "n007"}, {"a,n[1-2]", "a"}}) {
    Values other = values;
    other["SLURM_STEP_NODELIST"] = list;
    EXPECT_EQ(read(other).master_address, first);
  }
}

TEST(RankEnvironment, IsWhatMpirunSets) {
  const RankEnvironment open_mpi = read({{"OMPI_COMM_WORLD_RANK", "2"},
                                         {"OMPI_COMM_WORLD_SIZE", "3"},
                                         {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
                                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
                                         {"MASTER_PORT", "29501"}});
  EXPECT_EQ(open_mpi.rank, 2);
  EXPECT_EQ(open_mpi.ranks, 3);
  EXPECT_TRUE(open_mpi.one_machine);
  EXPECT_EQ(open_mpi.master_port, 29501);
  const RankEnvironment mpich =
      read({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MASTER_PORT", "29500"}, {"MASTER_ADDR", "10.0.0.7"}});
  EXPECT_EQ(mpich.rank, 1);
  EXPECT_EQ(mpich.ranks, 2);
  EXPECT_EQ(mpich.master_address, "10.0.0.7");
  EXPECT_FALSE(mpich.one_machine);
}

TEST(RankEnvironment, IsDetected) {
  const auto is_detected = [](const Values& values) {
    return is_in_rank_environment([&values](const char* name) -> const char* {
      const auto found = values.find(name);
      return found == values.end() ? nullptr : found->second.c_str();
    });
  };
  EXPECT_TRUE(is_detected(with({})));
  EXPECT_TRUE(is_detected({{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}));
  EXPECT_FALSE(is_detected({}));
  // An incomplete environment would let a process of several run alone.
  const std::string both =
      " is not set: a rank of several processes needs both.\n  Hint: whatever starts the ranks, such as torchrun, sets "
      "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.";
  expect_error<RendezvousError>([&] { is_detected({{"RANK", "1"}}); }, "RANK is '1', and WORLD_SIZE" + both);
  expect_error<RendezvousError>([&] { is_detected({{"WORLD_SIZE", "2"}}); }, "WORLD_SIZE is '2', and RANK" + both);
  EXPECT_TRUE(is_detected({{"RANK", "1"}, {"PMI_RANK", "1"}, {"PMI_SIZE", "2"}}));
  // A Slurm batch script outside of srun.
  EXPECT_FALSE(is_detected({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}}));
}

TEST(RankEnvironment, IsLoopbackUnlessAnAddressIsNamed) {
  const RankEnvironment found = read(with({}));
  EXPECT_EQ(found.master_address, "127.0.0.1");
  EXPECT_TRUE(found.one_machine);
  EXPECT_EQ(found.local_rank, 1);
  EXPECT_FALSE(found.agent_serves);
  EXPECT_EQ(found.listening_fd, -1);
}

TEST(RankEnvironment, IsOfOneMachineWhenAllRanksAreLocal) {
  EXPECT_TRUE(read(with({{"MASTER_ADDR", "node0.example"}, {"LOCAL_WORLD_SIZE", "4"}})).one_machine);
  EXPECT_FALSE(read(with({{"MASTER_ADDR", "node0.example"}, {"LOCAL_WORLD_SIZE", "2"}})).one_machine);
  EXPECT_FALSE(read(with({{"MASTER_ADDR", "node0.example"}})).one_machine);
}

TEST(RankEnvironment, HasAListeningSocketForRankZeroOnly) {
  EXPECT_EQ(read(with({{"RANK", "0"}, {"PENSTOCK_LISTENING_FD", "5"}})).listening_fd, 5);
  EXPECT_EQ(read(with({{"PENSTOCK_LISTENING_FD", "5"}})).listening_fd, -1);
}

TEST(RankEnvironment, NamesAMissingVariable) {
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_PORT"}) {
    Values values = with({});
    values.erase(name);
    expect_error<RendezvousError>(
        [&] { read(values); },
        std::string(name) +
            " is not set.\n  Hint: whatever starts the ranks, such as torchrun, sets RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT.");
  }
}

TEST(RankEnvironment, NamesAWrongNumberAndItsRange) {
  const auto expect = [](const char* name, const char* value, const std::string& right) {
    expect_error<RendezvousError>([&] { read(with({{name, value}})); },
                                  std::string(name) + " is '" + value + "', expected a number " + right + ".");
  };
  expect("RANK", "4", "from 0 to 3");
  expect("RANK", "-1", "from 0 to 3");
  expect("RANK", "one", "from 0 to 3");
  expect("RANK", "1 ", "from 0 to 3");
  expect("RANK", "99999999999999999999", "from 0 to 3");
  expect("WORLD_SIZE", "0", "of at least 1");
  expect("LOCAL_RANK", "7", "from 0 to 3");
  expect("LOCAL_WORLD_SIZE", "5", "from 1 to 4");
  expect("MASTER_PORT", "0", "from 1 to 65535");
  expect("MASTER_PORT", "65536", "from 1 to 65535");
  expect("TORCHELASTIC_RESTART_COUNT", "x", "of at least 0");
}

// Returns the environment of a rank whose store listens on a socket of the test, as with ProcessRanks.
RankEnvironment environment(int rank, int ranks, int port, int fd) {
  RankEnvironment made;
  made.rank = rank;
  made.ranks = ranks;
  made.one_machine = true;
  made.master_address = "127.0.0.1";
  made.master_port = port;
  made.listening_fd = rank == 0 ? fd : -1;
  return made;
}

TEST(Rendezvous, ConnectsAllRanksToOneStore) {
  Descriptor socket = listen_on("127.0.0.1", 0);
  const int port = port_of(socket);
  const int fd = socket.release();
  std::vector<std::string> found(3);
  // Rank 0 serves the store, so it is destroyed last.
  std::vector<Rendezvous> places(3);
  on_threads(3, [&](int rank) {
    Rendezvous& place = places[static_cast<std::size_t>(rank)] = rendezvous(environment(rank, 3, port, fd));
    EXPECT_EQ(place.rank, rank);
    EXPECT_EQ(place.ranks, 3);
    EXPECT_EQ(place.address, "127.0.0.1");
    place.store->set("from" + std::to_string(rank), std::string(static_cast<std::size_t>(rank) + 1, 'x'));
    found[static_cast<std::size_t>(rank)] = place.store->get_to_str("from" + std::to_string((rank + 1) % 3));
  });
  EXPECT_EQ(found, (std::vector<std::string>{"xx", "xxx", "x"}));
  places.pop_back();
  places.pop_back();
}

// Returns the addresses that are listened on at a port, in the notation of /proc/net/tcp.
std::vector<std::string> listeners(int port) {
  constexpr const char* kListening = "0A";
  std::ostringstream number;
  number << std::uppercase << std::hex;
  number.width(4);
  number.fill('0');
  number << port;
  std::vector<std::string> found;
  for (const char* path : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream file(path);
    std::string line;
    while (std::getline(file, line)) {
      std::istringstream words(line);
      std::string index;
      std::string local;
      std::string remote;
      std::string state;
      words >> index >> local >> remote >> state;
      const std::size_t colon = local.find(':');
      if (state == kListening && local.substr(colon + 1) == number.str()) found.push_back(local.substr(0, colon));
    }
  }
  return found;
}

TEST(Rendezvous, ListensOnLoopbackOnly) {
  int port = 0;
  {
    const Descriptor socket = listen_on("127.0.0.1", 0);
    port = port_of(socket);
  }
  const Rendezvous place = rendezvous(environment(0, 1, port, -1));
  EXPECT_EQ(listeners(port), std::vector<std::string>{"0100007F"});
}

TEST(Rendezvous, UsesTheStoreOfTorchrunsAgent) {
  Descriptor socket = listen_on("127.0.0.1", 0);
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.waitWorkers = false;
  options.port = static_cast<std::uint16_t>(port_of(socket));
  options.masterListenFd = socket.release();
  const auto agent = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  std::vector<std::string> found;
  for (const int attempt : {0, 1}) {
    RankEnvironment rank = environment(0, 1, options.port, -1);
    rank.agent_serves = true;
    rank.attempt = attempt;
    const Rendezvous place = rendezvous(rank);
    // Values of the previous attempt are not visible.
    EXPECT_FALSE(place.store->check({"key"}));
    place.store->set("key", std::to_string(attempt));
  }
  EXPECT_EQ(agent->get_to_str("penstock/0/key"), "0");
  EXPECT_EQ(agent->get_to_str("penstock/1/key"), "1");
}

TEST(Rendezvous, NamesTheAddressThatRankZeroCannotListenOn) {
  const Descriptor taken = listen_on("127.0.0.1", 0);
  const std::string port = std::to_string(port_of(taken));
  const std::string hint = ".\n  Hint: the address should be one of rank 0's machine, and the port free.";
  RankEnvironment rank = environment(0, 2, port_of(taken), -1);
  expect_error<RendezvousError>([&] { rendezvous(rank); },
                                "rank 0 cannot listen on MASTER_ADDR:MASTER_PORT, which is 127.0.0.1:" + port +
                                    ": Address already in use" + hint);
  rank.master_address = "192.0.2.1";
  expect_error<RendezvousError>([&] { rendezvous(rank); },
                                "rank 0 cannot listen on MASTER_ADDR:MASTER_PORT, which is 192.0.2.1:" + port +
                                    ": Cannot assign requested address" + hint);
}

TEST(Rendezvous, RefusesLoopbackForSeveralMachines) {
  RankEnvironment environment;
  environment.ranks = 2;
  environment.master_address = "127.0.1.1";
  environment.master_port = 29500;
  expect_error<RendezvousError>(
      [&] { rendezvous(environment); },
      "rank 0 resolves MASTER_ADDR, which is 127.0.1.1, to loopback, which other machines cannot reach.\n  Hint: with "
      "ranks on several machines, MASTER_ADDR should be an address that all of them can reach; a numeric one is "
      "safest. "
      "Or name the interface in GLOO_SOCKET_IFNAME.");
}

TEST(Rendezvous, RefusesADescriptorThatDoesNotListen) {
  expect_error<RendezvousError>([&] { rendezvous(environment(0, 2, 29500, 999)); },
                                "PENSTOCK_LISTENING_FD is '999', expected a socket that listens.");
}

TEST(Rendezvous, ReportsAMasterThatCannotBeReached) {
  int port = 0;
  {
    const Descriptor socket = listen_on("127.0.0.1", 0);
    port = port_of(socket);
  }
  expect_error<RendezvousError>(
      [&] { rendezvous(environment(1, 2, port, -1), std::chrono::milliseconds(100)); },
      "rank 1 cannot reach MASTER_ADDR:MASTER_PORT, which is 127.0.0.1:" + std::to_string(port) +
          ", within 0.1 s: Connection refused.\n  Hint: rank 0 has to be running there, on an address that the other "
          "ranks can "
          "reach.");
}

// A program that is not a store, on a port of its own.
class OtherProgram {
 public:
  // Sends this answer to each client, and then closes the connection or leaves it open.
  OtherProgram(std::string answer, bool closes)
      : thread_([this, answer = std::move(answer), closes] { serve(answer, closes); }) {}
  ~OtherProgram() {
    ending_ = true;
    thread_.join();
  }
  OtherProgram(const OtherProgram&) = delete;
  OtherProgram& operator=(const OtherProgram&) = delete;

  int port() const { return port_of(socket_); }

 private:
  void serve(const std::string& answer, bool closes) {
    std::vector<Descriptor> connections;
    while (!ending_) {
      pollfd waiting{.fd = socket_.number(), .events = POLLIN, .revents = 0};
      if (::poll(&waiting, 1, 10) <= 0) continue;
      Descriptor connection(::accept(socket_.number(), nullptr, nullptr));
      ::send(connection.number(), answer.data(), answer.size(), MSG_NOSIGNAL);
      if (!closes) connections.push_back(std::move(connection));
    }
  }

  Descriptor socket_ = listen_on("127.0.0.1", 0);
  std::atomic<bool> ending_ = false;
  std::thread thread_;
};

std::string error_at(int port, std::chrono::milliseconds timeout, std::vector<std::string>* lines = nullptr) {
  return message_of<RendezvousError>([&] {
    rendezvous(environment(1, 2, port, -1), timeout, [&](const std::string& line) {
      if (lines != nullptr) lines->push_back(line);
    });
  });
}

TEST(Rendezvous, ReportsAPortOfAnotherProgram) {
  const OtherProgram server("HTTP/1.1 400 Bad Request\r\n\r\n", /*closes=*/true);
  EXPECT_EQ(error_at(server.port(), std::chrono::seconds(60)),
            "rank 1 found no store at MASTER_ADDR:MASTER_PORT, which is 127.0.0.1:" + std::to_string(server.port()) +
                ": the program that listens there answered 'HTTP' to a ping.\n  Hint: the port belongs to another "
                "program; choose a "
                "free one as MASTER_PORT for all ranks.");
}

TEST(Rendezvous, TimesOutWhenTheMasterDoesNotAnswer) {
  const OtherProgram silent("", /*closes=*/false);
  std::vector<std::string> lines;
  const std::string master = "127.0.0.1:" + std::to_string(silent.port());
  EXPECT_EQ(error_at(silent.port(), std::chrono::milliseconds(200), &lines),
            "rank 1 found no store at MASTER_ADDR:MASTER_PORT, which is " + master +
                ": the program that listens there has not answered a ping within 0.2 s (it accepts connections and "
                "does not answer).\n"
                "  Hint: check that rank 0 has started; if it has, the port belongs to another program, and all ranks "
                "need a free one as MASTER_PORT.");
  EXPECT_EQ(lines, std::vector<std::string>{"rank 1 waits for rank 0 at " + master +
                                            ": it accepts connections and does not answer (0 s of 0.2 s)"});
}

TEST(Rendezvous, TriesAgainWhenTheMasterClosesTheConnection) {
  const OtherProgram closing("", /*closes=*/true);
  const std::string beginning =
      "rank 1 found no store at MASTER_ADDR:MASTER_PORT, which is 127.0.0.1:" + std::to_string(closing.port()) +
      ": the program that listens there has not answered a ping within 0.2 s (it ";
  EXPECT_EQ(error_at(closing.port(), std::chrono::milliseconds(200)).substr(0, beginning.size()), beginning);
}

TEST(Rendezvous, PassesItsTimeoutToTheTransport) {
  Descriptor socket = listen_on("127.0.0.1", 0);
  const int port = port_of(socket);
  std::vector<std::string> lines;
  const Rendezvous place = rendezvous(environment(0, 2, port, socket.release()), std::chrono::milliseconds(200),
                                      [&](const std::string& line) { lines.push_back(line); });
  const Thrown found = thrown_by([&] { c10d_transport(place); });
  EXPECT_TRUE(found.what.starts_with("rank 1 of 2 has not connected within 0.2 s.")) << found.what;
  EXPECT_EQ(lines, std::vector<std::string>{"rank 0 waits for rank 1 of 2 (0 s of 0.2 s)"});
}

TEST(Sockets, FindTheLocalAddressOfARoute) {
  EXPECT_EQ(internal::address_towards("127.0.0.1", 80), "127.0.0.1");
  EXPECT_EQ(internal::address_towards("no such name at all", 80), "");
}

}  // namespace
}  // namespace penstock::internal::testing
