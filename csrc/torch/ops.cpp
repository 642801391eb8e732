/* ops.cpp: the kernels of torch.ops.persia.*, through torch's stable ABI.
 *
 * They unpack tensors, call the store room and keep tensors alive; fake
 * kernels, autograd and the ordered effects are registered in Python
 * (persia/store/operators.py).  A name's version grows when its meaning
 * changes: inductor's cache on disk knows graphs by the names of their
 * operators.
 */
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "sched/sched.h"
#include "store/store.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

namespace {

/* Errors leave as RuntimeError "<class of persia.errors>: <text>". */
[[noreturn]] void fail(int code)
{
    const char *text = persia_err_text();
    throw std::runtime_error(std::string(persia_err_name(code)) + ": " +
                             (*text ? text : persia_err_message(code)));
}

void check(int code)
{
    if (code != PERSIA_OK)
        fail(code);
}

/* A reference to a store for the time of one call. */
class Store {
  public:
    Store(int64_t handle, const char *what)
    {
        check(persia_store_get(static_cast<uint64_t>(handle), what, &step_,
                               nullptr));
    }
    ~Store()
    {
        persia_store_put(step_);
    }
    Store(const Store &) = delete;
    Store &operator=(const Store &) = delete;
    store *get() const { return step_; }

  private:
    store *step_ = nullptr;
};

struct Shape {
    uint32_t kind, keys, width;
};

Shape shape_of(store *s, int64_t plan)
{
    Shape shape;
    check(persia_store_plan_shape(s, static_cast<uint32_t>(plan), &shape.kind,
                                  &shape.keys, &shape.width));
    return shape;
}

void expect(const Tensor &t, const char *name, ScalarType dtype,
            const char *dtype_name)
{
    if (t.scalar_type() != dtype) {
        persia_err_set(PERSIA_EDTYPE, "%s: wrong dtype, need %s", name,
                       dtype_name);
        fail(PERSIA_EDTYPE);
    }
    if (t.dim() != 1 || !t.is_contiguous()) {
        persia_err_set(PERSIA_ESHAPE, "%s: need one contiguous dimension",
                       name);
        fail(PERSIA_ESHAPE);
    }
}

/* The tensors of a batch seen as the worker's struct. */
id_batch batch_of(const Shape &shape, const Tensor &values,
                  const Optional &offsets, const Optional &weights)
{
    expect(values, "values", ScalarType::Long, "int64");
    id_batch b = {};
    b.n = static_cast<size_t>(values.numel());
    b.values = static_cast<const int64_t *>(values.const_data_ptr());
    size_t bags = b.n;
    if (offsets) {
        expect(*offsets, "offsets", ScalarType::Long, "int64");
        bags = static_cast<size_t>(offsets->numel()) - 1;
        if (offsets->numel() == 0 || bags % shape.keys) {
            persia_err_set(
                PERSIA_EOFFSETS,
                "%lld offsets for %u features; need features * samples "
                "+ 1",
                static_cast<long long>(offsets->numel()), shape.keys);
            fail(PERSIA_EOFFSETS);
        }
        b.offsets = static_cast<const int64_t *>(offsets->const_data_ptr());
    }
    b.bags = bags / shape.keys;
    if (weights) {
        expect(*weights, "weights", ScalarType::Float, "float32");
        if (weights->numel() != values.numel()) {
            persia_err_set(PERSIA_ESHAPE, "%lld weights for %zu ids",
                           static_cast<long long>(weights->numel()), b.n);
            fail(PERSIA_ESHAPE);
        }
        b.weights = static_cast<const float *>(weights->const_data_ptr());
    }
    return b;
}

/* The two numbers of a name or a ticket. */
const int64_t *numbers_of(const Tensor &ticket)
{
    expect(ticket, "ticket", ScalarType::Long, "int64");
    if (ticket.numel() != 2) {
        persia_err_set(PERSIA_ESHAPE, "ticket: need 2 numbers");
        fail(PERSIA_ESHAPE);
    }
    return static_cast<const int64_t *>(ticket.const_data_ptr());
}

/* The name of a forward: int64 [2], its number (0 without grad) and the
 * number of its batch (0: not looked up ahead; negative: it is the batch's
 * from its push on).  Names are tensors so that compiled graphs take them as
 * inputs.  `batch` is the ticket of the ids: the batch's number, and a
 * version that is negative if its ids are to be looked up now; AGAIN if they
 * were before, and perhaps this forward will never be pushed. */
enum { AGAIN = -2 };

Tensor ticket(const Tensor &batch, int64_t store, bool grad)
{
    Store s(store, "forward");
    Tensor out = torch::stable::new_empty(batch, {2}, ScalarType::Long);
    auto *name = static_cast<int64_t *>(out.mutable_data_ptr());
    if (grad) /* an update that failed meanwhile is told here, too */
        check(persia_store_error(s.get()));
    name[0] = grad ? static_cast<int64_t>(persia_store_ticket(s.get())) : 0;
    const int64_t *of = numbers_of(batch);
    name[1] = of[1] == AGAIN ? -of[0] : of[1] < 0 ? 0 : of[0];
    if (of[1] != AGAIN)
        persia_store_batch_bind(s.get(), static_cast<uint64_t>(of[0]),
                                static_cast<uint64_t>(name[0]));
    return out;
}

/* A lookup: what goes in and what comes out. */
struct Lookup {
    Tensor values;
    Optional offsets, weights;
    id_batch batch;
    uint32_t plan, width;
    int64_t height;
    Tensor out, rows;
    batch_index *index = nullptr;

    Lookup(store *s, const Tensor &values, const Optional &offsets,
           const Optional &weights, int64_t plan)
        : values(values), offsets(offsets), weights(weights),
          plan(static_cast<uint32_t>(plan))
    {
        Shape shape = shape_of(s, plan);
        width = shape.width;
        batch = batch_of(shape, values, offsets, weights);
        height = static_cast<int64_t>(shape.kind == PLAN_BAGS ? batch.bags
                                                              : batch.n);
    }

    ~Lookup()
    {
        persia_batch_index_put(index);
    }
    Lookup(const Lookup &) = delete;
    Lookup &operator=(const Lookup &) = delete;

    void allocate()
    {
        out = torch::stable::new_empty(values, {height, width},
                                       ScalarType::Float);
        rows = torch::stable::new_empty(
            values, {static_cast<int64_t>(batch.n)}, ScalarType::Int);
    }

    float *vectors() { return static_cast<float *>(out.mutable_data_ptr()); }
    uint32_t *hints()
    {
        return static_cast<uint32_t *>(rows.mutable_data_ptr());
    }
    static void release(void *owner) { delete static_cast<Lookup *>(owner); }
};

/* Adds a lookup to a batch of a data loader that looks ahead. */
void prefetch(const Tensor &values, const Optional &offsets,
              const Optional &weights, int64_t store, int64_t plan,
              int64_t number)
{
    Store s(store, "data loader");
    auto own = std::make_unique<Lookup>(s.get(), values, offsets, weights,
                                        plan);
    own->allocate();
    store_lookup want = {};
    want.plan = own->plan;
    want.batch = own->batch;
    want.out = own->vectors();
    want.stride = own->width;
    want.hints = own->hints();
    want.index = &own->index;
    want.owner = own.get();
    want.release = Lookup::release;
    check(persia_store_batch_lookup(s.get(), static_cast<uint64_t>(number),
                                    &want));
    own.release();
}

/* Takes what was looked up for this batch, if it fits it. */
std::unique_ptr<Lookup> ahead_of(store *s, int64_t number, const Lookup &now)
{
    void *owner = nullptr;
    check(persia_store_batch_take(s, static_cast<uint64_t>(number), now.plan,
                                  &owner));
    std::unique_ptr<Lookup> ahead(static_cast<Lookup *>(owner));
    if (ahead &&
        (ahead->batch.n != now.batch.n || ahead->height != now.height))
        ahead.reset();
    return ahead;
}

std::tuple<Tensor, Tensor> pull(const Tensor &values, const Optional &offsets,
                                const Optional &weights, const Tensor &,
                                const Tensor &ticket, int64_t store,
                                int64_t plan)
{
    Store s(store, "forward");
    Lookup now(s.get(), values, offsets, weights, plan);
    const int64_t *name = numbers_of(ticket);
    auto number = static_cast<uint64_t>(name[0]);
    if (auto ahead = ahead_of(s.get(), name[1] > 0 ? name[1] : 0, now)) {
        persia_store_keep_index(s.get(), number,
                                std::exchange(ahead->index, nullptr));
        return {std::move(ahead->out), std::move(ahead->rows)};
    }
    now.allocate();
    int taken;
    check(persia_store_read(
        s.get(), static_cast<uint64_t>(name[1] > 0 ? name[1] : 0), number,
        now.plan, now.batch.bags, now.vectors(), now.width, &taken));
    if (!taken)
        check(persia_store_forward(s.get(), number, now.plan, &now.batch,
                                   now.vectors(), now.width, now.hints()));
    return {now.out, now.rows};
}

/* No gradient of this forward will come: its graph was freed. */
void drop(const Tensor &ticket, int64_t store)
{
    ::store *s = nullptr;
    if (persia_store_get(static_cast<uint64_t>(store), "forward", &s,
                         nullptr) == PERSIA_OK) {
        persia_store_drop_index(s,
                                static_cast<uint64_t>(numbers_of(ticket)[0]));
        persia_store_put(s);
    }
}

/* The tensors that a held gradient needs until it is applied. */
struct Held {
    Tensor grad, values;
    Optional offsets, weights;
    Tensor rows;
};

void release(void *owner)
{
    delete static_cast<Held *>(owner);
}

/* keep: the tensors stay as they are until the update, so their references
 * are held; otherwise (compiled graphs reuse their buffers) a copy is. */
void push(const Tensor &grad, const Tensor &values, const Optional &offsets,
          const Optional &weights, const Tensor &rows, const Tensor &ticket,
          int64_t store, int64_t plan, bool keep)
{
    Store s(store, "backward");
    Shape shape = shape_of(s.get(), plan);
    store_grad g = {};
    g.grad.plan = static_cast<uint32_t>(plan);
    g.grad.batch = batch_of(shape, values, offsets, weights);
    expect(rows, "rows", ScalarType::Int, "int32");
    size_t height =
        shape.kind == PLAN_BAGS ? g.grad.batch.bags : g.grad.batch.n;
    /* Its rows may lie apart: columns of a wider gradient, as those of what
     * torch.cat() joined to the embeddings, are taken where they are. */
    bool dense = grad.is_contiguous();
    if (grad.scalar_type() != ScalarType::Float || grad.dim() != 2 ||
        grad.size(0) != static_cast<int64_t>(height) ||
        grad.size(1) != shape.width || rows.numel() != values.numel() ||
        !(dense || (grad.stride(1) == 1 && grad.stride(0) >= shape.width))) {
        persia_err_set(
            PERSIA_ESHAPE,
            "the gradient is not a float32 tensor [%zu, %u] whose rows "
            "are contiguous",
            height, shape.width);
        fail(PERSIA_ESHAPE);
    }
    size_t stride = static_cast<size_t>(dense ? shape.width : grad.stride(0));
    const int64_t *name = numbers_of(ticket);
    g.ticket = static_cast<uint64_t>(name[0]);
    if (name[1] < 0)
        persia_store_batch_bind(s.get(), static_cast<uint64_t>(-name[1]),
                                g.ticket);
    if (persia_store_is_embedded(s.get())) /* else the index has them */
        g.grad.rows = static_cast<const uint32_t *>(rows.const_data_ptr());
    g.grad.grad = static_cast<const float *>(grad.const_data_ptr());
    g.grad.stride = stride;

    if (keep) {
        g.owner = new Held{grad, values, offsets, weights, rows};
        g.release = release;
    } else {
        size_t floats = height ? (height - 1) * stride + shape.width : 0;
        check(persia_store_copy_grad(
            s.get(), &g, floats,
            offsets ? static_cast<size_t>(offsets->numel()) : 0));
    }
    int code = persia_store_add_grad(s.get(), &g);
    if (code != PERSIA_OK) {
        g.release(g.owner);
        fail(code);
    }
}

/* Loops of the user's threads run on torch's OpenMP threads: between torch's
 * own loops those spin, and would keep the cores from workers of ours. */
unsigned team_size()
{
    return torch::stable::get_num_threads();
}

void team_run(unsigned n, void (*body)(void *ctx), void *ctx)
{
    torch::stable::parallel_for(0, n, 1,
                                [&](int64_t, int64_t) { body(ctx); });
}

const sched_team team = {team_size, team_run};

} // namespace

STABLE_TORCH_LIBRARY(persia, m)
{
    persia_sched_team_install(&team);
    m.def("ticket_v1(Tensor batch, int store, bool grad) -> Tensor");
    m.def("prefetch_v1(Tensor values, Tensor? offsets, Tensor? weights, "
                       "int store, int plan, int batch) -> ()");
    m.def("pull_v1(Tensor values, Tensor? offsets, Tensor? weights, "
          "Tensor anchor, Tensor ticket, int store, int plan) "
          "-> (Tensor, Tensor)");
    m.def("push_v1(Tensor grad, Tensor values, Tensor? offsets, "
          "Tensor? weights, Tensor rows, Tensor ticket, int store, int plan, "
          "bool keep) -> ()");
    m.def("drop_v1(Tensor ticket, int store) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(persia, CPU, m)
{
    m.impl("ticket_v1", TORCH_BOX(&ticket));
    m.impl("prefetch_v1", TORCH_BOX(&prefetch));
    m.impl("pull_v1", TORCH_BOX(&pull));
    m.impl("push_v1", TORCH_BOX(&push));
    m.impl("drop_v1", TORCH_BOX(&drop));
}
