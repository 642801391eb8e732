/* ops.h: what the operators of ops.cpp and device.cpp share (private): errors,
 * stores by handle, tensors as the core's structs, lookups. */
#ifndef PERSIA_TORCH_OPS_H
#define PERSIA_TORCH_OPS_H

#include <cstdlib>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "loop/loop.h"

namespace persia_ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

/* Errors leave as RuntimeError "<class of persia.errors>: <text>". */
[[noreturn]] inline void fail(int code)
{
    const char *text = persia_err_text();
    throw std::runtime_error(std::string(persia_err_name(code)) + ": " +
                             (*text ? text : persia_err_message(code)));
}

inline void check(int code)
{
    if (code != PERSIA_OK)
        fail(code);
}

/* A reference to a store for the time of one call. */
class Store {
  public:
    Store(int64_t handle, const char *what)
    {
        check(persia_loop_get(static_cast<uint64_t>(handle), what, &step_,
                              nullptr));
    }
    ~Store()
    {
        persia_loop_put(step_);
    }
    Store(const Store &) = delete;
    Store &operator=(const Store &) = delete;
    loop *get() const { return step_; }

  private:
    loop *step_ = nullptr;
};

struct Shape {
    uint32_t kind, keys, width;
};

inline Shape shape_of(loop *s, int64_t plan)
{
    Shape shape;
    check(persia_loop_plan_shape(s, static_cast<uint32_t>(plan), &shape.kind,
                                 &shape.keys, &shape.width));
    return shape;
}

inline void expect(const Tensor &t, const char *name, ScalarType dtype,
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

/* The tensors of a batch seen as the struct of room batch. */
inline id_batch batch_of(const Shape &shape, const Tensor &values,
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
inline const int64_t *numbers_of(const Tensor &ticket)
{
    expect(ticket, "ticket", ScalarType::Long, "int64");
    if (ticket.numel() != 2) {
        persia_err_set(PERSIA_ESHAPE, "ticket: need 2 numbers");
        fail(PERSIA_ESHAPE);
    }
    return static_cast<const int64_t *>(ticket.const_data_ptr());
}

/* Rows of a plan's output. */
inline size_t height_of(const Shape &shape, const id_batch &batch)
{
    return shape.kind == PLAN_BAGS ? batch.bags : batch.n;
}

/* Added to the number in the ticket of a batch whose ids are elsewhere. */
constexpr int64_t TAKEN = int64_t{1} << 62;

/* Of a ticket or name: the number alone. */
inline uint64_t batch_number(int64_t name)
{
    return static_cast<uint64_t>(std::abs(name) & ~TAKEN);
}

/* Of which forward a gradient is, and its ids' rows. */
inline void name_grad(loop *s, loop_grad *g, const Tensor &rows,
                      const Tensor &ticket)
{
    const int64_t *name = numbers_of(ticket);
    expect(rows, "rows", ScalarType::Int, "int32");
    if (static_cast<size_t>(rows.numel()) != g->grad.batch.n) {
        persia_err_set(PERSIA_ESHAPE, "rows: %lld for %zu ids",
                       static_cast<long long>(rows.numel()),
                       g->grad.batch.n);
        fail(PERSIA_ESHAPE);
    }
    g->ticket = static_cast<uint64_t>(name[0]);
    if (name[1] < 0)
        persia_loop_batch_bind(s, batch_number(name[1]), g->ticket);
    if (persia_loop_is_embedded(s)) /* else the index has them */
        g->grad.rows = static_cast<const uint32_t *>(rows.const_data_ptr());
}

/* The store owns it from now on. */
inline void add_grad(loop *s, const loop_grad &g)
{
    int code = persia_loop_add_grad(s, &g);
    if (code != PERSIA_OK) {
        g.release(g.owner);
        fail(code);
    }
}

/* A lookup: its input and its output. */
struct Lookup {
    Tensor values;
    Optional offsets, weights;
    id_batch batch;
    uint32_t plan, width;
    int64_t height;
    Tensor out, rows;
    batch_index *index = nullptr;

    Lookup(loop *s, const Tensor &values, const Optional &offsets,
           const Optional &weights, int64_t plan)
        : values(values), offsets(offsets), weights(weights),
          plan(static_cast<uint32_t>(plan))
    {
        Shape shape = shape_of(s, plan);
        width = shape.width;
        batch = batch_of(shape, values, offsets, weights);
        height = static_cast<int64_t>(height_of(shape, batch));
    }

    virtual ~Lookup()
    {
        persia_batch_index_put(index);
    }
    Lookup(const Lookup &) = delete;
    Lookup &operator=(const Lookup &) = delete;

    /* Where the values go: HERE, or a number of a link and a dtype. */
    static constexpr int64_t HERE = -1;
    virtual int64_t way() const { return HERE; }

    virtual void allocate()
    {
        out = torch::stable::new_empty(values, {height, width},
                                       ScalarType::Float);
        rows = torch::stable::new_empty(
            values, {static_cast<int64_t>(batch.n)}, ScalarType::Int);
    }

    virtual float *vectors()
    {
        return static_cast<float *>(out.mutable_data_ptr());
    }
    uint32_t *hints()
    {
        return static_cast<uint32_t *>(rows.mutable_data_ptr());
    }
    static void release(void *owner) { delete static_cast<Lookup *>(owner); }
};

/* Adds a lookup to a batch of a data loader that looks ahead. */
inline void look_ahead(loop *s, int64_t number, std::unique_ptr<Lookup> own,
                       int (*send)(void *owner) = nullptr)
{
    own->allocate();
    loop_lookup want = {};
    want.plan = own->plan;
    want.batch = own->batch;
    want.out = own->vectors();
    want.stride = own->width;
    want.hints = own->hints();
    want.index = &own->index;
    want.send = send;
    want.owner = own.get();
    want.release = Lookup::release;
    check(persia_loop_batch_lookup(s, static_cast<uint64_t>(number), &want));
    own.release();
}

/* Takes what was looked up for this batch, if it fits it. */
inline std::unique_ptr<Lookup> ahead_of(loop *s, int64_t number,
                                        const Lookup &now)
{
    void *owner = nullptr;
    if (number & TAKEN) /* see look_up_now() */
        return nullptr;
    check(persia_loop_batch_take(s, static_cast<uint64_t>(number), now.plan,
                                 &owner));
    std::unique_ptr<Lookup> ahead(static_cast<Lookup *>(owner));
    if (ahead && (ahead->batch.n != now.batch.n ||
                  ahead->height != now.height || ahead->way() != now.way()))
        ahead.reset();
    return ahead;
}

/* The lookup of a forward of this name that none was ahead of. */
inline void look_up_now(loop *s, const int64_t *name, Lookup &now)
{
    const auto number = static_cast<uint64_t>(name[0]);
    now.allocate();
    if (std::abs(name[1]) & TAKEN)
        check(persia_loop_read(s, batch_number(name[1]), number, now.plan,
                               &now.batch, now.vectors(), now.width));
    else
        check(persia_loop_forward(s, number, now.plan, &now.batch,
                                  now.vectors(), now.width, now.hints()));
}

} // namespace persia_ops

#endif
