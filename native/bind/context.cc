// Bindings of a rank's Context. Blocking calls run without the GIL, and check for Ctrl-C regularly.

#include "core/rank/context.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>

#include "bind.h"

namespace nb = nanobind;

namespace multiring {
namespace {

constexpr double kSignalCheck_s = 0.2;  // longest time between two checks for Ctrl-C

using Bytes = nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>;
using RailTuple = std::pair<std::string, int>;
using PeerTuple = std::tuple<int, bool, std::string, std::vector<RailTuple>, std::string>;

struct Block {
  std::shared_ptr<Segment> segment;
  std::byte* start;
};

Bytes allocate(Context& context, size_t bytes) {
  auto segment = context.own_segment();
  std::byte* start = segment->allocate(bytes);
  auto* block = new Block{std::move(segment), start};
  const nb::capsule owner(block, [](void* held) noexcept {
    const std::unique_ptr<Block> last(static_cast<Block*>(held));
    last->segment->release(last->start);
  });
  return Bytes(start, {bytes}, owner);
}

bool connect(Context& context, const std::vector<PeerTuple>& peers, const std::vector<int>& local_ranks,
             const std::vector<int>& neighbours, double timeout_s, const nb::callable& disturbed) {
  std::vector<PeerAddress> addresses;
  for (const auto& [rank, same_host, handover, rails, place] : peers) {
    addresses.push_back({rank, same_host, handover, {}, place});
    for (const auto& [host, port] : rails) addresses.back().rails.push_back({host, static_cast<uint16_t>(port)});
  }
  bool raised = false;
  bool connected = false;
  auto next_look = Clock::now();
  {
    const WithoutGil release;
    connected = context.connect(addresses, local_ranks, neighbours, timeout_s, [&] {
      if (Clock::now() < next_look) return false;
      next_look = Clock::now() + std::chrono::milliseconds(50);
      const nb::gil_scoped_acquire acquire;
      raised = PyErr_CheckSignals() != 0;
      return raised || nb::cast<bool>(disturbed());
    });
  }
  if (raised) throw nb::python_error();
  return connected;
}

using BounceTuple = std::tuple<uint64_t, int, uint32_t, bool, uintptr_t, size_t>;

std::tuple<std::vector<BounceTuple>, std::vector<int>, bool, bool> collect(Context& context, int64_t pause_ns) {
  MpiProxy::Work work;
  {
    const WithoutGil release;
    work = context.collect(std::chrono::nanoseconds(pause_ns));
  }
  std::vector<BounceTuple> bounces;
  bounces.reserve(work.bounces.size());
  for (const BounceBuffer& p : work.bounces) {
    bounces.emplace_back(p.number, p.peer, p.tag, p.is_outgoing, reinterpret_cast<uintptr_t>(p.data), p.size);
  }
  return {std::move(bounces), std::move(work.gone), work.is_pending, work.is_closed};
}

}  // namespace

bool wait_for(Context& context, const std::shared_ptr<Operation>& operation, double timeout_s) {
  const auto start = Clock::now();
  for (;;) {
    const double left = timeout_s - std::chrono::duration<double>(Clock::now() - start).count();
    Context::Waited waited{};
    {
      const WithoutGil release;
      waited = context.wait(operation, std::clamp(left, 0.0, kSignalCheck_s));
    }
    if (waited == Context::Waited::ended) return true;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (left <= kSignalCheck_s && waited == Context::Waited::timed_out) return false;
  }
}

void bind_context(nb::module_& m) {
  nb::class_<ContextConfig>(m, "ContextConfig")
      .def(
          "__init__",
          [](ContextConfig* self, int rank, int size, const nb::bytes& job, const nb::bytes& secret,
             size_t segment_bytes, double stall_warn_s, double stall_timeout_s, bool log_moves, bool lower,
             bool read_peers, bool by_mpi, double rail_timeout_s, double wire_timeout_s, bool seal) {
            new (self) ContextConfig{rank, size, {job.c_str(), job.size()}, {secret.c_str(), secret.size()},
                                     segment_bytes, stall_warn_s, stall_timeout_s, log_moves, lower, read_peers, by_mpi,
                                     rail_timeout_s, wire_timeout_s, seal};
          },
          nb::kw_only(), nb::arg("rank"), nb::arg("size"), nb::arg("job"), nb::arg("secret"), nb::arg("segment_bytes"),
          nb::arg("stall_warn_s"), nb::arg("stall_timeout_s"), nb::arg("log_moves"), nb::arg("lower"),
          nb::arg("read_peers"), nb::arg("by_mpi"), nb::arg("rail_timeout_s"), nb::arg("wire_timeout_s"),
          nb::arg("seal") = false)
      .def_rw("own_losses_only", &ContextConfig::own_losses_only,
              "Whether the rank believes no other rank that a third one is lost, because the ranks vote on it.");
  nb::class_<Context> bound(m, "Context");
  bound.def(nb::init<ContextConfig>(), nb::arg("config"))
      .def_prop_ro("handover_name", &Context::handover_name)
      .def("listen", &Context::listen, nb::arg("host"), nb::arg("first_port"), nb::arg("last_port"),
           "Listen at a numeric address and return the port, the first free one of the range. Each call adds a rail.")
      .def("use_connections", &Context::use_connections, nb::arg("count"),
           "Divide each rail to another host into `count` connections, each with a thread. All ranks must do the same "
           "before `connect`.")
      .def("connect", &connect, nb::arg("peers"), nb::arg("local_ranks"), nb::arg("neighbours"), nb::arg("timeout_s"),
           nb::arg("disturbed"),
           "Connect to the peers; return False if `disturbed` returned True first. Each peer is (rank, is on the same "
           "host, handover name, (host, port) of each rail, text that names its host).")
      .def("allocate", &allocate, nb::arg("bytes"),
           "Return arena memory as a uint8 array. The last array that views it frees it.")
      .def("arena_bytes", [](Context& context) { return context.own_segment()->used_bytes(); })
      .def(
          "holds",
          [](Context& context, uintptr_t address, size_t bytes) {
            return context.own_segment()->mapping().contains(reinterpret_cast<const void*>(address), bytes);
          },
          nb::arg("address"), nb::arg("bytes"), "Return whether the memory lies in this rank's arena.")
      .def("post", &Context::post, nb::arg("spec"), nb::arg("caller_waits"), nb::call_guard<WithoutGil>())
      .def("wait", &wait_for, nb::arg("operation"), nb::arg("timeout_s"))
      .def("has_ended", &Context::has_ended, nb::arg("operation"), nb::call_guard<WithoutGil>())
      .def("stalled_on", &Context::stalled_on, nb::arg("operation"), nb::call_guard<WithoutGil>(),
           "Return the ranks that the operation waits for, and the seconds since anything moved.")
      .def("give_up", &Context::give_up, nb::arg("operation"), nb::arg("silent"), nb::call_guard<WithoutGil>(),
           "Fail an operation in flight on all its ranks, as if rank `silent` had been silent for too long.")
      .def("abort", &Context::abort, nb::arg("operation"), nb::arg("culprit"), nb::call_guard<WithoutGil>(),
           "Fail an operation in flight on all its ranks, because rank `culprit` has aborted the group.")
      .def("goodputs", &Context::goodputs, nb::call_guard<WithoutGil>(),
           "Return (rank, recent bytes per second) of the connected ranks of other hosts, if known.")
      .def("read_by", &Context::read_by, nb::call_guard<WithoutGil>(),
           "Return the ranks of this host that can read this rank's ordinary memory.")
      .def("has_failed", &Context::has_failed, nb::call_guard<WithoutGil>(),
           "Return whether a rank died, a group stalled or was aborted, or this rank cannot communicate.")
      .def(
          "losses",
          [](Context& context) {
            std::map<int, std::tuple<bool, std::string>> out;
            for (const auto& [rank, loss] : context.losses()) out[rank] = {is_death(loss.kind), loss.why};
            return out;
          },
          "Return the lost ranks, each with (died rather than left, reason).")
      .def(
          "take_events",
          [](Context& context) {
            std::vector<std::tuple<int, uint32_t, uint64_t, uint64_t, uint64_t, int64_t, int64_t, int64_t>> out;
            for (const Event& e : context.take_events()) {
              out.emplace_back(static_cast<int>(e.kind), e.name, e.key.group, e.key.sequence, e.bytes, e.start_ns,
                               e.agreed_ns, e.end_ns);
            }
            return out;
          },
          "Return the events since the last call: (kind, name, group, sequence, bytes, start ns, agreed ns, end ns). "
          "The kinds are operation, wait and rail; for a lost rail, `name` is its index and `sequence` the peer.")
      .def(
          "rails",
          [](Context& context) {
            std::vector<std::tuple<int, int, bool, uint64_t, double>> out;
            for (const RailStatus& r : context.rails())
              out.emplace_back(r.peer, r.rail, r.is_up, r.acknowledged, r.busy_s);
            return out;
          },
          "Return (peer, rail, is up, acknowledged bytes, busy seconds) of every connection to another host.")
      .def(
          "take_rail_losses",
          [](Context& context) {
            std::vector<std::tuple<int, int, std::string>> out;
            for (const RailLoss& loss : context.take_rail_losses()) out.emplace_back(loss.peer, loss.rail, loss.why);
            return out;
          },
          "Return (peer, rail, reason) of the rails lost since the last call.")
      .def("dropped_events", &Context::dropped_events)
      .def("keep_timeline", &Context::keep_timeline, nb::arg("keeps"), nb::call_guard<WithoutGil>(),
           "Start or stop recording events for `take_timeline`.")
      .def(
          "take_timeline",
          [](Context& context) {
            std::vector<Event> rows;
            {
              const WithoutGil release;
              rows = context.take_timeline();
            }
            return nb::bytes(reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(Event));
          },
          "Return the events since the last call as rows of `trace.part.ROW`.")
      .def("dropped_from_timeline", &Context::dropped_from_timeline)
      .def("settled", &Context::settled, nb::arg("timeout_s"), nb::call_guard<WithoutGil>(),
           "Wait until no operation is in flight and every frame has been sent. Return False after `timeout_s`.")
      .def("collect", &collect, nb::arg("pause_ns"),
           "Return the work for the thread that calls MPI: (new bounce buffers, newly lost peers, whether messages are "
           "in transit, whether the context is closed). A bounce buffer is (number, peer, tag, is outgoing, address, "
           "bytes). Without new work, wait: up to `pause_ns` while messages are in transit, else until there is work.")
      .def("carried", &Context::carried, nb::arg("numbers"), nb::call_guard<WithoutGil>(),
           "Report that MPI has sent or received these bounce buffers.")
      .def("cannot_reach", &Context::cannot_reach, nb::arg("peer"), nb::arg("why"), nb::call_guard<WithoutGil>(),
           "Report that MPI fails for this peer; the peer then counts as lost.")
      .def("allow_spin", &Context::allow_spin, nb::arg("seconds"))
      .def("close", &Context::close, nb::arg("grace_s"), nb::arg("announce"), nb::call_guard<WithoutGil>());
  bind_context_control(bound);
}

}  // namespace multiring
