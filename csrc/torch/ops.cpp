/* ops.cpp: the kernels of torch.ops.persia.*, through torch's stable ABI.
 *
 * They unpack tensors, call the store room and keep tensors alive; fake
 * kernels, autograd and the ordered effects are registered in Python
 * (persia/store/operators.py).  A name's version grows when its meaning
 * changes: inductor's cache on disk knows graphs by the names of their
 * operators.
 */
#include <memory>
#include <tuple>
#include <utility>

#include "sched/sched.h"
#include "torch/ops.h"

using namespace persia_ops;

namespace {

/* The name of a forward: int64 [2], its number (0 without grad) and the
 * number of its batch (0: not looked up ahead; negative: it is the batch's
 * from its push on).  Names are tensors so that compiled graphs take them as
 * inputs.  `batch` is the ticket of the ids: the batch's number, and a
 * version that is negative if its ids are to be looked up now; AGAIN if they
 * were before, and perhaps this forward will never be pushed.  A number with
 * TAKEN is of a batch whose ids are elsewhere: it cannot be looked up. */
enum { AGAIN = -2 };

/* A number of this process alone, not 0. */
int64_t process()
{
    static const uint64_t own = [] {
        uint64_t id = 0;
        check(persia_random_id(&id));
        return id >> 1 | 1;
    }();
    return static_cast<int64_t>(own);
}

/* A saved graph keeps the handle of its store, which is another store's in
 * another process: `of` is the process that made the graph, int64 [1]. */
void check_process(const Tensor &of)
{
    expect(of, "process", ScalarType::Long, "int64");
    if (of.numel() == 1 &&
        *static_cast<const int64_t *>(of.const_data_ptr()) == process())
        return;
    persia_err_set(PERSIA_EARG,
                   "this graph was made in another process, and looks up "
                   "rows of a store there: a saved graph (torch.export, "
                   "torch.jit.trace) holds no rows. Make the graph here, of "
                   "a model whose rows are loaded (store.load), or save that "
                   "of persia.export_torch(model), which has the rows as "
                   "weights");
    fail(PERSIA_EARG);
}

Tensor ticket(const Tensor &batch, const Tensor &made_in, int64_t store,
              bool grad)
{
    check_process(made_in);
    Store s(store, "forward");
    Tensor out = torch::stable::new_empty(batch, {2}, ScalarType::Long);
    auto *name = static_cast<int64_t *>(out.mutable_data_ptr());
    if (grad) /* an update that failed meanwhile is raised here, too */
        check(persia_loop_error(s.get()));
    name[0] = grad ? static_cast<int64_t>(persia_loop_ticket(s.get())) : 0;
    const int64_t *of = numbers_of(batch);
    const bool anew = of[1] < 0 && !(of[0] & TAKEN);
    name[1] = of[1] == AGAIN ? -of[0] : anew ? 0 : of[0];
    if (of[1] != AGAIN)
        persia_loop_batch_bind(s.get(), batch_number(of[0]),
                               static_cast<uint64_t>(name[0]));
    return out;
}

/* Adds a lookup to a batch of a data loader that looks ahead. */
void prefetch(const Tensor &values, const Optional &offsets,
              const Optional &weights, int64_t store, int64_t plan,
              int64_t number)
{
    Store s(store, "data loader");
    look_ahead(s.get(), number,
               std::make_unique<Lookup>(s.get(), values, offsets, weights,
                                        plan));
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
        persia_loop_keep_index(s.get(), number,
                               std::exchange(ahead->index, nullptr));
        return {std::move(ahead->out), std::move(ahead->rows)};
    }
    look_up_now(s.get(), name, now);
    return {now.out, now.rows};
}

/* Both in one call, for eager models: a call of an operator from Python costs
 * as much as the lookup of a small batch. */
std::tuple<Tensor, Tensor, Tensor>
look_up(const Tensor &values, const Optional &offsets, const Optional &weights,
        const Tensor &batch, const Tensor &made_in, int64_t store,
        int64_t plan, bool grad)
{
    Tensor name = ticket(batch, made_in, store, grad);
    auto [out, rows] =
        pull(values, offsets, weights, batch, name, store, plan);
    return {std::move(out), std::move(rows), std::move(name)};
}

/* No gradient of this forward will be given: its graph was freed. */
void drop(const Tensor &ticket, int64_t store)
{
    ::loop *s = nullptr;
    if (persia_loop_get(static_cast<uint64_t>(store), "forward", &s,
                        nullptr) == PERSIA_OK) {
        persia_loop_drop_index(s,
                               static_cast<uint64_t>(numbers_of(ticket)[0]));
        persia_loop_put(s);
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
    loop_grad g = {};
    g.grad.plan = static_cast<uint32_t>(plan);
    g.grad.batch = batch_of(shape, values, offsets, weights);
    size_t height = height_of(shape, g.grad.batch);
    /* Its rows may lie apart: columns of a wider gradient, as those of what
     * torch.cat() joined to the embeddings, are taken where they are. */
    bool dense = grad.is_contiguous();
    if (grad.scalar_type() != ScalarType::Float || grad.dim() != 2 ||
        grad.size(0) != static_cast<int64_t>(height) ||
        grad.size(1) != shape.width ||
        !(dense || (grad.stride(1) == 1 && grad.stride(0) >= shape.width))) {
        persia_err_set(
            PERSIA_ESHAPE,
            "the gradient is not a float32 tensor [%zu, %u] whose rows "
            "are contiguous",
            height, shape.width);
        fail(PERSIA_ESHAPE);
    }
    size_t stride = static_cast<size_t>(dense ? shape.width : grad.stride(0));
    name_grad(s.get(), &g, rows, ticket);
    g.grad.grad = static_cast<const float *>(grad.const_data_ptr());
    g.grad.stride = stride;

    if (keep) {
        g.owner = new Held{grad, values, offsets, weights, rows};
        g.release = release;
    } else {
        size_t floats = height ? (height - 1) * stride + shape.width : 0;
        check(persia_loop_copy_grad(
            s.get(), &g, floats,
            offsets ? static_cast<size_t>(offsets->numel()) : 0));
    }
    add_grad(s.get(), g);
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
    m.def("process_v1() -> int");
    m.def("ticket_v2(Tensor batch, Tensor process, int store, bool grad) "
          "-> Tensor");
    m.def("prefetch_v1(Tensor values, Tensor? offsets, Tensor? weights, "
                       "int store, int plan, int batch) -> ()");
    m.def("pull_v1(Tensor values, Tensor? offsets, Tensor? weights, "
          "Tensor anchor, Tensor ticket, int store, int plan) "
          "-> (Tensor, Tensor)");
    m.def("look_up_v1(Tensor values, Tensor? offsets, Tensor? weights, "
          "Tensor batch, Tensor process, int store, int plan, bool grad) "
          "-> (Tensor, Tensor, Tensor)");
    m.def("push_v1(Tensor grad, Tensor values, Tensor? offsets, "
          "Tensor? weights, Tensor rows, Tensor ticket, int store, int plan, "
          "bool keep) -> ()");
    m.def("drop_v1(Tensor ticket, int store) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(persia, CPU, m)
{
    m.impl("ticket_v2", TORCH_BOX(&ticket));
    m.impl("prefetch_v1", TORCH_BOX(&prefetch));
    m.impl("pull_v1", TORCH_BOX(&pull));
    m.impl("look_up_v1", TORCH_BOX(&look_up));
    m.impl("push_v1", TORCH_BOX(&push));
    m.impl("drop_v1", TORCH_BOX(&drop));
}

STABLE_TORCH_LIBRARY_IMPL(persia, CompositeExplicitAutograd, m)
{
    m.impl("process_v1", TORCH_BOX(&process));
}
