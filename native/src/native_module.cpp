// sparkle._native: bindings only. Its Python face is shared/sparkle/_native.pyi, written by hand.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <system_error>

#include "belady.h"
#include "client.h"
#include "learned.h"
#include "mapping.h"
#include "reader.h"
#include "ring.h"
#include "slots.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace sparkle;

namespace {

struct Pool {  // what prefetch does
  Segment segment;
  Evictor evictor;
};

Segment format(const std::string& name, std::uint32_t n_layers, std::uint32_t n_experts, std::uint32_t n_slots,
               const std::string& fingerprint, const std::string& layout) {
  const std::size_t n_bytes = Control::bytes_for(n_layers, n_experts, n_slots);
  auto mapping = std::make_shared<Mapping>(Mapping::create(name, n_bytes));
  try {
    return {mapping, Control::format(mapping->data(), n_bytes, n_layers, n_experts, n_slots, fingerprint, layout)};
  } catch (...) {
    Mapping::unlink(name);
    throw;
  }
}

Segment attach(const std::string& name, bool must_be_complete) {
  auto mapping = std::make_shared<Mapping>(Mapping::attach(name));
  return {mapping, Control::open(mapping->data(), mapping->size(), must_be_complete)};
}

nb::list drain(Control control, std::uint32_t bit, std::uint64_t limit) {
  nb::list out;
  for (const Event& e : ring_drain(control.ring(bit), limit)) {
    nb::list experts, is_hit;
    for (std::size_t i = 0; i < e.experts.size(); ++i) {
      experts.append(e.experts[i]);
      is_hit.append(bool(e.is_hit[i]));
    }
    out.append(nb::make_tuple(e.step, e.time_us, e.stream, e.rows, e.token, e.layer, experts, is_hit));
  }
  return out;
}

std::vector<Span> spans_of(const std::vector<std::tuple<std::uintptr_t, std::size_t>>& pairs) {
  std::vector<Span> spans;
  for (auto [address, n_bytes] : pairs) spans.push_back({reinterpret_cast<std::byte*>(address), n_bytes});
  return spans;
}

void set_client(Header& header, std::uint32_t bit, const std::string& name) {
  if (bit >= kMaxClients) throw std::out_of_range("client bit");
  if (name.size() >= sizeof(Incarnation)) throw std::invalid_argument("client name too long");
  std::memcpy(header.clients[bit].name, name.c_str(), name.size() + 1);
}

std::vector<std::tuple<std::size_t, std::uint32_t>> next_victims(LearnedPolicy::Victims& victims, std::size_t n) {
  std::vector<std::tuple<std::size_t, std::uint32_t>> keys;
  while (keys.size() < n) {
    const auto key = victims.next();
    if (!key) break;
    keys.emplace_back(key->place, key->expert);
  }
  return keys;
}

template <typename T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

}  // namespace

NB_MODULE(_native, m) {
  nb::set_leak_warnings(false);  // views of a pool may outlive this module at exit: the process ends with them
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const std::system_error& e) {
      errno = e.code().value();
      PyErr_SetObject(PyExc_OSError, nb::make_tuple(e.code().value(), e.what()).ptr());
    }
  });

  m.attr("MAX_CLIENTS") = kMaxClients;
  m.attr("RING_WORDS") = kRingWords;
  m.attr("PAGE_BYTES") = kPage;
  m.attr("CAN_DISCARD") = kCanDiscard;
  m.attr("EMPTY") = int(kEmpty);
  m.attr("LOADING") = int(kLoading);
  m.attr("READY") = int(kReady);
  m.attr("EVICTING") = int(kEvicting);
  m.attr("RETIRED") = int(kRetired);

  nb::class_<Mapping>(m, "Mapping")
      .def_static("create", &Mapping::create, "name"_a, "n_bytes"_a, nb::call_guard<nb::gil_scoped_release>())
      .def_static("create_sparse", &Mapping::create_sparse, "name"_a, "n_bytes"_a)
      .def_static("attach", &Mapping::attach, "name"_a)
      .def_static("unlink", &Mapping::unlink, "name"_a)
      .def("reserve", &Mapping::reserve, "offset"_a, "n_bytes"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("discard", &Mapping::discard, "offset"_a, "n_bytes"_a, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("address", [](const Mapping& s) { return reinterpret_cast<std::uintptr_t>(s.data()); })
      .def_prop_ro("n_bytes", &Mapping::size)
      .def_prop_ro("backed_bytes", &Mapping::backed)
      // The array keeps the mapping alive: memory is unmapped when the last view is gone, never before.
      .def("array", [](nb::handle_t<Mapping> self) {
        const auto& s = nb::cast<const Mapping&>(self);
        return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(s.data(), {s.size()}, self);
      });

  nb::class_<Pool>(m, "Pool")
      .def_static(
          "create",
          [](const std::string& name, std::uint32_t n_layers, std::uint32_t n_experts, std::uint32_t n_slots,
             const std::string& fingerprint, const std::string& layout) {
            Segment s = format(name, n_layers, n_experts, n_slots, fingerprint, layout);
            return Pool{s, Evictor(s.control)};
          },
          "name"_a, "n_layers"_a, "n_experts"_a, "n_slots"_a, "fingerprint"_a, "layout"_a)
      .def_static(
          "attach",
          [](const std::string& name) {
            Segment s = attach(name, false);
            return Pool{s, Evictor(s.control)};
          },
          "name"_a)
      .def("complete", [](Pool& p) { p.segment.control.header().is_complete.store(1); })
      .def_prop_ro("is_complete", [](Pool& p) { return p.segment.control.header().is_complete.load() == 1; })
      .def_prop_ro("fingerprint", [](Pool& p) { return std::string(p.segment.control.header().fingerprint); })
      .def_prop_ro("layout", [](Pool& p) { return std::string(p.segment.control.header().layout); })
      .def_prop_ro("n_slots", [](Pool& p) { return p.segment.control.n_slots(); })
      .def_prop_rw(
          "epoch", [](Pool& p) { return p.segment.control.header().epoch.load(); },
          [](Pool& p, std::uint64_t epoch) { p.segment.control.header().epoch.store(epoch); })
      .def_prop_rw(
          "wants_hints", [](Pool& p) { return p.segment.control.header().wants_hints.load() != 0; },
          [](Pool& p, bool wants) { p.segment.control.header().wants_hints.store(wants ? 1 : 0); })
      .def(
          "client_name",
          [](Pool& p, std::uint32_t bit) {
            return std::string(p.segment.control.header().clients[bit % kMaxClients].name);
          },
          "bit"_a)
      .def(
          "set_client",
          [](Pool& p, std::uint32_t bit, const std::string& name) {
            set_client(p.segment.control.header(), bit, name);
          },
          "bit"_a, "name"_a)
      .def(
          "reset_ring",
          [](Pool& p, std::uint32_t bit) {
            Ring& r = p.segment.control.ring(bit);
            r.read.store(0);
            r.written.store(0);
          },
          "bit"_a)
      .def(
          "lookup",
          [](Pool& p, std::uint32_t layer, std::uint32_t expert) {
            return p.segment.control.table(layer, expert).load();
          },
          "layer"_a, "expert"_a)
      .def(
          "state", [](Pool& p, std::uint32_t s) { return p.segment.control.slot(s).state.load(); }, "slot"_a)
      .def(
          "owner",
          [](Pool& p, std::uint32_t s) {
            const std::uint32_t o = p.segment.control.slot(s).owner.load();
            return o == kNoOwner ? nb::object(nb::none()) : nb::object(nb::make_tuple(o >> 16, o & 0xFFFF));
          },
          "slot"_a)
      .def(
          "mask", [](Pool& p, std::uint32_t s) { return p.segment.control.slot(s).mask.load(); }, "slot"_a)
      .def(
          "gen", [](Pool& p, std::uint32_t s) { return p.segment.control.slot(s).gen.load(); }, "slot"_a)
      .def("n_held",
           [](Pool& p) {
             std::uint32_t n = 0;
             for (std::uint32_t s = 0; s < p.segment.control.n_slots(); ++s)
               n += p.segment.control.slot(s).mask.load() != 0;
             return n;
           })
      .def(
          "begin_load",
          [](Pool& p, std::uint32_t s, std::uint32_t layer, std::uint32_t expert) {
            return p.evictor.begin_load(s, layer, expert);
          },
          "slot"_a, "layer"_a, "expert"_a)
      .def(
          "publish", [](Pool& p, std::uint32_t s, std::uint64_t grants) { p.evictor.publish(s, grants); }, "slot"_a,
          "grants"_a)
      .def(
          "abandon", [](Pool& p, std::uint32_t s) { p.evictor.abandon(s); }, "slot"_a)
      .def(
          "unload", [](Pool& p, std::uint32_t s) { return p.evictor.unload(s); }, "slot"_a)
      .def(
          "retire", [](Pool& p, std::uint32_t s) { return p.evictor.retire(s); }, "slot"_a)
      .def(
          "restore", [](Pool& p, std::uint32_t s) { p.evictor.restore(s); }, "slot"_a)
      .def(
          "grant", [](Pool& p, std::uint32_t s, std::uint64_t bits) { return p.evictor.grant(s, bits); }, "slot"_a,
          "bits"_a)
      .def(
          "clear_client", [](Pool& p, std::uint32_t bit) { return p.evictor.clear_client(bit); }, "bit"_a)
      .def(
          "recover", [](Pool& p, std::uint32_t s) { return p.evictor.recover(s); }, "slot"_a)
      .def(
          "drain", [](Pool& p, std::uint32_t bit, std::uint64_t limit) { return drain(p.segment.control, bit, limit); },
          "bit"_a, "limit"_a);

  nb::class_<Client>(m, "PoolClient")
      .def_static(
          "attach",
          [](const std::string& name, std::uint32_t bit) { return std::make_shared<Client>(attach(name, true), bit); },
          "name"_a, "bit"_a)
      .def_prop_ro("fingerprint", [](Client& c) { return std::string(c.control().header().fingerprint); })
      .def_prop_ro("layout", [](Client& c) { return std::string(c.control().header().layout); })
      .def_prop_ro("epoch", [](Client& c) { return c.control().header().epoch.load(); })
      .def_prop_ro("n_held", [](Client& c) { return c.holder().n_held(); })
      .def_prop_ro("wants_hints", [](Client& c) { return c.control().header().wants_hints.load() != 0; })
      .def_prop_ro("ring_position", [](Client& c) { return c.ring().written.load(); })
      .def("absent", &Client::absent, "layer"_a, "experts"_a)
      .def("hold", &Client::hold, "layer"_a, "experts"_a)
      .def("release", &Client::release, "slots"_a)
      .def(
          "drop_grants",
          [](Client& c, const std::vector<std::uint32_t>& slots) {
            for (auto s : slots) c.holder().drop_grant(s);
          },
          "slots"_a)
      .def("reconcile", [](Client& c) { c.holder().reconcile(); })
      .def(
          "push_event",
          [](Client& c, std::uint32_t step, std::uint16_t stream, std::uint16_t rows, std::uint32_t token,
             std::uint32_t layer, const std::vector<std::uint32_t>& experts, const std::vector<std::int32_t>& slots) {
            if (experts.size() != slots.size()) throw std::invalid_argument("experts and slots differ in length");
            return ring_push(c.ring(), {step, stream, rows, token}, layer, experts, slots);
          },
          "step"_a, "stream"_a, "rows"_a, "token"_a, "layer"_a, "experts"_a, "slots"_a)
      // For sparkle._mlx_ops, which knows nothing of this module's types.
      .def("share", [](Client& c) {
        auto* shared = new std::shared_ptr<Client>(c.shared_from_this());
        return nb::capsule(shared, Client::kCapsule,
                           [](void* p) noexcept { delete static_cast<std::shared_ptr<Client>*>(p); });
      });

  nb::class_<Reader>(m, "Reader")
      .def_static("with_threads", &Reader::with_threads, "depth"_a, "block_bytes"_a, "record_bytes"_a)
      .def_static("with_uring", &Reader::with_uring, "depth"_a, "block_bytes"_a, "record_bytes"_a)
      .def(
          "submit",
          [](Reader& r, std::uint64_t tag, int fd, std::uint64_t offset,
             const std::vector<std::tuple<std::uintptr_t, std::size_t>>& spans,
             bool is_direct) { r.submit({tag, fd, offset, spans_of(spans), is_direct}); },
          "tag"_a, "fd"_a, "offset"_a, "spans"_a, "is_direct"_a)
      .def("reap",
           [](Reader& r) {
             nb::list out;
             for (const Completion& c : r.reap()) out.append(nb::make_tuple(c.tag, c.error, c.seconds, c.n_retries));
             return out;
           })
      .def(
          "register_memory",
          [](Reader& r, const std::vector<std::tuple<std::uintptr_t, std::size_t>>& spans) {
            nb::gil_scoped_release release;  // pinning a gigabyte takes half a second
            return r.register_memory(spans_of(spans));
          },
          "spans"_a)
      .def("keep_open", &Reader::keep_open, "fd"_a)
      .def_prop_ro("event_fd", [](Reader& r) { return r.event_fd(); })
      .def_prop_ro("name", [](Reader& r) { return r.name(); });

  nb::class_<LearnedPolicy::Victims>(m, "LearnedVictims").def("next", &next_victims, "n"_a);

  nb::class_<LearnedPolicy>(m, "LearnedPolicy")
      .def_static(
          "create",
          [](const std::vector<std::tuple<std::uint32_t, std::uint32_t>>& layers) {
            std::vector<LearnedPolicy::Shape> shapes;
            for (auto [n_experts, top_k] : layers) shapes.push_back({n_experts, top_k});
            return LearnedPolicy(shapes);
          },
          "layers"_a)
      .def(
          "seed", [](LearnedPolicy& p, std::size_t place, const std::vector<double>& shares) { p.seed(place, shares); },
          "place"_a, "shares"_a)
      .def(
          "turn",
          [](LearnedPolicy& p, std::size_t place, std::uint32_t stream, std::uint32_t rows, std::uint32_t token,
             const std::vector<std::uint32_t>& experts) { p.turn(place, {stream, rows, token, experts}); },
          "place"_a, "stream"_a, "rows"_a, "token"_a, "experts"_a)
      .def("put", &LearnedPolicy::put, "place"_a, "expert"_a)
      .def("take", &LearnedPolicy::take, "place"_a, "expert"_a)
      .def(
          "victims", [](const LearnedPolicy& p) { return LearnedPolicy::Victims(p); }, nb::keep_alive<0, 1>())
      .def(
          "values",
          [](const LearnedPolicy& p, std::size_t place) {
            const auto values = p.values(place);
            return nb::cast(nb::ndarray<nb::numpy, const float, nb::ndim<1>>(values.data(), {values.size()}),
                            nb::rv_policy::copy);
          },
          "place"_a)
      .def_prop_ro("weights",
                   [](const LearnedPolicy& p) { return std::vector<double>(p.weights().begin(), p.weights().end()); });

  m.def(
      "belady",
      [](Array<std::uint32_t> keys, Array<std::uint64_t> offsets, std::size_t n_slots, Array<std::uint32_t> resident,
         bool has_bypass) {
        std::vector<std::uint32_t> misses;
        {
          nb::gil_scoped_release release;
          misses = belady({keys.data(), keys.size()}, {offsets.data(), offsets.size()}, n_slots,
                          {resident.data(), resident.size()}, has_bypass);
        }
        return nb::cast(nb::ndarray<nb::numpy, std::uint32_t, nb::ndim<1>>(misses.data(), {misses.size()}),
                        nb::rv_policy::copy);
      },
      "keys"_a, "offsets"_a, "n_slots"_a, "resident"_a, "has_bypass"_a);
}
