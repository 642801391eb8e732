/* device.cpp: the operators whose values live on a device: pulls that are
 * sent there from pinned memory, gradients that are fetched, and pooling.
 *
 * Python (persia/store/device.py) chooses the streams and calls them so that
 * tensors are allocated on the stream of the copies.  The host can stand for
 * a device: then its tensors are ordinary ones.
 */
#include <memory>
#include <tuple>
#include <utility>

#include <torch/csrc/stable/accelerator.h>

#include "cuda/cuda.h"
#include "torch/ops.h"

using namespace persia_ops;

namespace {

const char *const device_names[] = {"host", "cuda"};
enum { DEVICES = 2 };

const char *device_name(int64_t kind)
{
    if (kind >= 0 && kind < DEVICES)
        return device_names[kind];
    persia_err_set(PERSIA_EARG, "there is no device %lld",
                   static_cast<long long>(kind));
    fail(PERSIA_EARG);
}

void *stream_of(int64_t stream)
{
    return reinterpret_cast<void *>(static_cast<intptr_t>(stream));
}

device_link *link_of(int64_t link)
{
    device_link *l = persia_link_get(static_cast<uint32_t>(link));
    if (!l)
        fail(PERSIA_EARG);
    return l;
}

uint32_t dtype_of(const Tensor &t)
{
    switch (t.scalar_type()) {
    case ScalarType::Float:
        return CUDA_F32;
    case ScalarType::Half:
        return CUDA_F16;
    case ScalarType::BFloat16:
        return CUDA_BF16;
    default:
        persia_err_set(PERSIA_EDTYPE, "values on a device are float32, "
                                      "float16 or bfloat16");
        fail(PERSIA_EDTYPE);
    }
}

int64_t link_open(int64_t kind, int64_t index, int64_t in, int64_t out)
{
    uint32_t number;
    check(persia_link_open(device_name(kind), static_cast<int>(index),
                           stream_of(in), stream_of(out), &number));
    return number;
}

/* ---- values to the device ---- */

/* A lookup whose values are sent: `there` is allocated as `like` is. */
struct Sent : Lookup {
    device_link *link;
    int64_t number;
    Tensor like, there;
    uint32_t dtype;
    link_buffer *buffer = nullptr;

    Sent(::loop *s, const Tensor &values, const Optional &offsets,
         const Optional &weights, int64_t plan, const Tensor &like,
         int64_t link)
        : Lookup(s, values, offsets, weights, plan), link(link_of(link)),
          number(link), like(like), dtype(dtype_of(like))
    {
    }

    /* What was not used is dropped: its memory must outlive the copy. */
    ~Sent() override
    {
        if (buffer)
            persia_link_wait(buffer);
        persia_link_give(buffer);
    }

    int64_t way() const override { return number * CUDA_DTYPES + dtype; }

    void allocate() override
    {
        there = torch::stable::new_empty(like, {height, width});
        rows = torch::stable::new_empty(
            values, {static_cast<int64_t>(batch.n)}, ScalarType::Int);
        check(persia_link_take(link, floats() * sizeof(float), &buffer));
    }

    float *vectors() override { return static_cast<float *>(buffer->data); }

    size_t floats() const { return static_cast<size_t>(height) * width; }

    int send()
    {
        return persia_link_send(buffer, there.mutable_data_ptr(), floats(),
                                dtype);
    }

    /* The stream sees the values; the buffer may be used again then. */
    Tensor arrive(void *stream)
    {
        check(persia_link_await(buffer, stream));
        persia_link_give(std::exchange(buffer, nullptr));
        return there;
    }
};

int send(void *owner)
{
    try {
        return static_cast<Sent *>(static_cast<Lookup *>(owner))->send();
    } catch (const std::exception &e) {
        return persia_err_set(PERSIA_EINTERNAL, "%s", e.what());
    }
}

void prefetch_to(const Tensor &values, const Optional &offsets,
                 const Optional &weights, const Tensor &like, int64_t store,
                 int64_t plan, int64_t batch, int64_t link)
{
    Store s(store, "data loader");
    look_ahead(s.get(), batch,
               std::make_unique<Sent>(s.get(), values, offsets, weights, plan,
                                      like, link),
               send);
}

std::tuple<Tensor, Tensor>
pull_to(const Tensor &values, const Optional &offsets, const Optional &weights,
        const Tensor &, const Tensor &ticket, const Tensor &like,
        int64_t store, int64_t plan, int64_t link, int64_t stream)
{
    Store s(store, "forward");
    Sent now(s.get(), values, offsets, weights, plan, like, link);
    const int64_t *name = numbers_of(ticket);
    if (auto ahead = ahead_of(s.get(), name[1] > 0 ? name[1] : 0, now)) {
        persia_loop_keep_index(s.get(), static_cast<uint64_t>(name[0]),
                               std::exchange(ahead->index, nullptr));
        auto *sent = static_cast<Sent *>(ahead.get()); /* the way is ours */
        return {sent->arrive(stream_of(stream)), std::move(sent->rows)};
    }
    look_up_now(s.get(), name, now);
    check(now.send());
    return {now.arrive(stream_of(stream)), now.rows};
}

/* ---- gradients from the device ---- */

/* Starts a copy; its number. */
int64_t fetch(const Tensor &grad, int64_t link, int64_t stream)
{
    const uint32_t dtype = dtype_of(grad);
    const size_t n = static_cast<size_t>(grad.numel());
    link_buffer *b;
    if (!grad.is_contiguous()) {
        persia_err_set(PERSIA_ESHAPE, "the gradient is not contiguous");
        fail(PERSIA_ESHAPE);
    }
    check(persia_link_take(link_of(link), n * sizeof(float), &b));
    int code = persia_link_fetch(b, grad.const_data_ptr(), n, dtype,
                                 stream_of(stream));
    if (code) {
        persia_link_give(b);
        fail(code);
    }
    return static_cast<int64_t>(persia_link_keep(b));
}

/* It is not wanted: then what is copied may be freed. */
void drop_fetch(int64_t flight, int64_t link)
{
    link_buffer *b =
        persia_link_kept(link_of(link), static_cast<uint64_t>(flight));
    if (b)
        persia_link_wait(b);
    persia_link_give(b);
}

struct Fetched {
    link_buffer *buffer;
    Tensor values;
    Optional offsets, weights;
    Tensor rows;
    Optional grad;
};

int arrive(void *owner)
{
    const float *floats;
    return persia_link_floats(static_cast<Fetched *>(owner)->buffer, &floats);
}

void release(void *owner)
{
    auto *f = static_cast<Fetched *>(owner);
    persia_link_give(f->buffer);
    delete f;
}

/* grad: what is copied, if nothing else keeps it. */
void push_from(const Tensor &values, const Optional &offsets,
               const Optional &weights, const Tensor &rows,
               const Tensor &ticket, int64_t store, int64_t plan,
               const Optional &grad, int64_t flight, int64_t link)
{
    Store s(store, "backward");
    Shape shape = shape_of(s.get(), plan);
    loop_grad g = {};
    g.grad.plan = static_cast<uint32_t>(plan);
    g.grad.batch = batch_of(shape, values, offsets, weights);
    g.grad.stride = shape.width;
    link_buffer *b =
        persia_link_kept(link_of(link), static_cast<uint64_t>(flight));
    std::unique_ptr<link_buffer, void (*)(link_buffer *)> guard(
        b, persia_link_give);
    if (!b || b->n != height_of(shape, g.grad.batch) * shape.width) {
        persia_err_set(PERSIA_ESHAPE,
                       "the gradient is not a tensor [%zu, %u]",
                       height_of(shape, g.grad.batch), shape.width);
        fail(PERSIA_ESHAPE);
    }
    name_grad(s.get(), &g, rows, ticket);
    g.grad.grad = static_cast<const float *>(b->data);
    g.owner = new Fetched{guard.release(), values, offsets, weights, rows,
                          grad};
    g.release = release;
    g.arrive = arrive;
    add_grad(s.get(), g);
}

/* ---- rows that are pooled on the device ---- */

/* Distinct ids of a plan's batch by table, where each table begins, and the
 * place of each id among them, feature after feature; offsets of all features
 * (empty: one id a bag) and weights (empty: none) in that order. */
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>
distinct(const Tensor &values, const Optional &offsets,
         const Optional &weights, int64_t store, int64_t plan)
{
    Store s(store, "forward");
    Shape shape = shape_of(s.get(), plan);
    id_batch batch = batch_of(shape, values, offsets, weights);
    batcher_group *group;
    check(persia_loop_group(s.get(), static_cast<uint32_t>(plan), &batch,
                            &group));
    const batcher_group_sizes n = persia_batcher_group_sizes(group);
    auto empty = [&](size_t size, ScalarType type) {
        return torch::stable::new_empty(values, {static_cast<int64_t>(size)},
                                        type);
    };
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> out = {
        empty(n.rows, ScalarType::Long), empty(n.tables + 1, ScalarType::Long),
        empty(n.ids, ScalarType::Int),
        empty(n.bags ? n.bags + 1 : 0, ScalarType::Int),
        empty(weights ? n.ids : 0, ScalarType::Float)};
    auto &[ids, starts, inverse, of, w] = out;
    persia_batcher_group_fill(
        group, &batch, static_cast<uint64_t *>(ids.mutable_data_ptr()),
        static_cast<int64_t *>(starts.mutable_data_ptr()),
        static_cast<int32_t *>(inverse.mutable_data_ptr()),
        n.bags ? static_cast<int32_t *>(of.mutable_data_ptr()) : nullptr,
        weights ? static_cast<float *>(w.mutable_data_ptr()) : nullptr);
    persia_batcher_group_free(group);
    return out;
}

/* One element or more of this type, or NULL. */
template <typename T> const T *data_of(const Tensor &t, ScalarType type)
{
    if (t.numel() == 0)
        return nullptr;
    if (t.scalar_type() != type || !t.is_contiguous()) {
        persia_err_set(PERSIA_EDTYPE, "a tensor of places has a wrong dtype, "
                                      "or is not contiguous");
        fail(PERSIA_EDTYPE);
    }
    return static_cast<const T *>(t.const_data_ptr());
}

cuda_bags bags_of(const Tensor &features, const Tensor &offsets,
                  const Tensor &weights, int64_t bags)
{
    cuda_bags of = {};
    of.features = reinterpret_cast<const cuda_feature *>(
        data_of<int32_t>(features, ScalarType::Int));
    of.features_n = static_cast<size_t>(features.size(0));
    of.bags = static_cast<size_t>(bags);
    of.offsets = data_of<int32_t>(offsets, ScalarType::Int);
    of.weights = data_of<float>(weights, ScalarType::Float);
    return of;
}

/* Launches a kernel with the tensor's device as the current one. */
template <typename Args>
void launch(int64_t kind, const Tensor &on, int64_t stream,
            int (*const cuda_device::*kernel)(void *, const Args *),
            const Args &args)
{
    const cuda_device *d;
    check(persia_cuda_open(device_name(kind), &d));
    std::unique_ptr<torch::stable::accelerator::DeviceGuard> guard;
    if (kind)
        guard = std::make_unique<torch::stable::accelerator::DeviceGuard>(
            on.get_device_index());
    check(persia_mem_device_check(&d->mem,
                                  (d->*kernel)(stream_of(stream), &args),
                                  "a kernel"));
}

Tensor pool(const Tensor &rows, const Tensor &inverse, const Tensor &offsets,
            const Tensor &weights, const Tensor &features, int64_t bags,
            int64_t columns, int64_t kind, int64_t stream)
{
    Tensor out = torch::stable::new_empty(rows, {bags, columns},
                                          ScalarType::Float);
    cuda_pool a = {};
    a.of = bags_of(features, offsets, weights, bags);
    a.rows = rows.const_data_ptr();
    a.rows_dtype = dtype_of(rows);
    a.row_stride = static_cast<size_t>(rows.size(1));
    a.inverse = data_of<int32_t>(inverse, ScalarType::Int);
    a.out = out.mutable_data_ptr();
    a.out_dtype = CUDA_F32;
    a.out_stride = static_cast<size_t>(columns);
    a.width = static_cast<uint32_t>(rows.size(1));
    launch(kind, rows, stream, &cuda_device::pool, a);
    return out;
}

Tensor sum(const Tensor &grad, const Tensor &order, const Tensor &starts,
           const Tensor &bag, const Tensor &offsets, const Tensor &weights,
           const Tensor &features, int64_t bags, int64_t width, int64_t kind,
           int64_t stream)
{
    const int64_t rows = starts.numel() - 1;
    Tensor out = torch::stable::new_empty(grad, {rows, width},
                                          ScalarType::Float);
    cuda_sum a = {};
    a.of = bags_of(features, offsets, weights, bags);
    a.grad = grad.const_data_ptr();
    a.grad_dtype = dtype_of(grad);
    a.grad_stride = static_cast<size_t>(grad.size(1));
    a.order = data_of<int64_t>(order, ScalarType::Long);
    a.starts = data_of<int32_t>(starts, ScalarType::Int);
    a.bag = data_of<int32_t>(bag, ScalarType::Int);
    a.out = out.mutable_data_ptr();
    a.out_dtype = CUDA_F32;
    a.out_stride = static_cast<size_t>(width);
    a.rows = static_cast<size_t>(rows);
    a.width = static_cast<uint32_t>(width);
    launch(kind, grad, stream, &cuda_device::sum, a);
    return out;
}

bool rows_travel(int64_t values, int64_t rows, int64_t ids, int64_t bags,
                 int64_t bytes)
{
    return persia_cuda_rows_travel(
               static_cast<uint64_t>(values), static_cast<uint64_t>(rows),
               static_cast<uint64_t>(ids), static_cast<uint64_t>(bags),
               static_cast<uint32_t>(bytes)) != 0;
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(persia, m)
{
    m.def("link_open_v1(int kind, int index, int to, int back) -> int");
    m.def("prefetch_to_v1(Tensor values, Tensor? offsets, Tensor? weights, "
          "Tensor like, int store, int plan, int batch, int link) -> ()");
    m.def("pull_to_v1(Tensor values, Tensor? offsets, Tensor? weights, "
          "Tensor anchor, Tensor ticket, Tensor like, int store, int plan, "
          "int link, int stream) -> (Tensor, Tensor)");
    m.def("fetch_v1(Tensor grad, int link, int stream) -> int");
    m.def("drop_fetch_v1(int flight, int link) -> ()");
    m.def("push_from_v1(Tensor values, Tensor? offsets, Tensor? weights, "
          "Tensor rows, Tensor ticket, int store, int plan, Tensor? grad, "
          "int flight, int link) -> ()");
    m.def("distinct_v1(Tensor values, Tensor? offsets, Tensor? weights, "
          "int store, int plan) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
    m.def("pool_v1(Tensor rows, Tensor inverse, Tensor offsets, "
          "Tensor weights, Tensor features, int bags, int columns, int kind, "
          "int stream) -> Tensor");
    m.def("sum_v1(Tensor grad, Tensor order, Tensor starts, Tensor bag, "
          "Tensor offsets, Tensor weights, Tensor features, int bags, "
          "int width, int kind, int stream) -> Tensor");
    m.def("rows_travel_v1(int values, int rows, int ids, int bags, "
          "int bytes) -> bool");
}

/* For tensors of any device. */
STABLE_TORCH_LIBRARY_IMPL(persia, CompositeExplicitAutograd, m)
{
    m.impl("link_open_v1", TORCH_BOX(&link_open));
    m.impl("prefetch_to_v1", TORCH_BOX(&prefetch_to));
    m.impl("pull_to_v1", TORCH_BOX(&pull_to));
    m.impl("fetch_v1", TORCH_BOX(&fetch));
    m.impl("drop_fetch_v1", TORCH_BOX(&drop_fetch));
    m.impl("push_from_v1", TORCH_BOX(&push_from));
    m.impl("distinct_v1", TORCH_BOX(&distinct));
    m.impl("pool_v1", TORCH_BOX(&pool));
    m.impl("sum_v1", TORCH_BOX(&sum));
    m.impl("rows_travel_v1", TORCH_BOX(&rows_travel));
}
