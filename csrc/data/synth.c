/* synth.c: click logs with a planted model.
 *
 * A row takes its random words from philox at (row, block) with the seed as
 * key, so it depends on nothing but the configuration and its number.  Word
 * pairs are used in a fixed order: ids of singles, lengths, ids of multis,
 * dense features, label.
 *
 * The logit is bias + signal * (weighted sum of four parts), each of mean 0
 * and variance 1 over the rows:
 *   singles  sum over features of an effect of the id
 *   multis   the same over the ids of the bag
 *   pairs    sum over pairs of singles of <u_f, u_g>, u of RANK numbers
 *   dense    a linear function and the product of the first two features
 * Effects of rare ids are smaller, so that what the planted model knows can
 * be learned from a few million rows.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data/data.h"
#include "simd/simd.h"
#include "data/hash.h"

enum {
    RANK = 2,        /* numbers of an id that take part in pairs */
    EFFECTS = 1 + RANK,
    SINGLES_MAX = 512,
    MULTIS_MAX = 64,
    LENGTH_MAX = 64,
    DENSE_MAX = 512,
    COMMON_IDS = 10, /* the rank at which effects begin to fade */
};

/* Shares of the variance of the logit, where there are such features. */
static const double share_singles = 0.485, share_multis = 0.03,
                    share_pairs = 0.015, share_dense = 0.47,
                    share_product = 0.04 /* of the dense part */;

/* Draws a rank by the alias method: slot k is k with probability
 * keep / 2^32, else `other`. */
typedef struct alias_slot {
    uint32_t keep, other;
} alias_slot;

/* Zipf's law over the ranks 0 .. n - 1. */
typedef struct zipf_table {
    uint32_t n;
    alias_slot *slots; /* [n] */
    double *p;         /* [n], probabilities; only while tables are made */
} zipf_table;

/* Centre and scale of the effects of a feature's ids. */
typedef struct feature {
    uint64_t id_key, effect_key;
    float mean[EFFECTS], scale[EFFECTS];
} feature;

struct synth {
    synth_config c;
    uint32_t key[2];    /* of philox */
    size_t blocks;      /* of random words, a row */
    size_t word_bag;    /* where the words of lengths and multis begin */
    size_t word_dense;
    size_t word_label;
    double bias;
    double w_singles, w_multis, w_pairs; /* of the parts */
    float *w_dense;     /* [dense] */
    float w_product;
    zipf_table singles; /* the vocabulary of a single-valued feature */
    zipf_table multis;  /* a multi-valued one's: a tenth of it */
    float *fade;        /* [vocabulary] factor of a rank's effects */
    feature *features;  /* [singles + multis] */
};

void persia_synth_config_init(synth_config *config)
{
    *config = (synth_config){.seed = 1,
                             .singles = 26,
                             .multis = 2,
                             .max_length = 7,
                             .dense = 13,
                             .vocabulary = 10000,
                             .zipf = 1.05,
                             .ctr = 0.25,
                             .signal = 1.35};
}

static int config_check(const synth_config *c)
{
    if (c->singles + c->multis == 0 || c->singles > SINGLES_MAX ||
        c->multis > MULTIS_MAX)
        return persia_err_set(PERSIA_EARG,
                              "singles is %u and multis %u; need at least one "
                              "feature, at most %d and %d",
                              c->singles, c->multis, SINGLES_MAX, MULTIS_MAX);
    if (c->multis && (c->max_length == 0 || c->max_length > LENGTH_MAX))
        return persia_err_set(PERSIA_EARG, "max_length is %u, need 1 to %d",
                              c->max_length, LENGTH_MAX);
    if (c->dense > DENSE_MAX)
        return persia_err_set(PERSIA_EARG, "dense is %u, at most %d", c->dense,
                              DENSE_MAX);
    if (c->vocabulary == 0 || c->vocabulary > 1u << 30)
        return persia_err_set(PERSIA_EARG, "vocabulary is %u, need 1 to 2^30",
                              c->vocabulary);
    if (!(c->zipf >= 0 && c->zipf <= 10))
        return persia_err_set(PERSIA_EARG, "zipf is %g, need 0 to 10",
                              c->zipf);
    if (!(c->ctr > 0 && c->ctr < 1))
        return persia_err_set(PERSIA_EARG,
                              "ctr is %g, need a number between 0 "
                              "and 1",
                              c->ctr);
    if (!(c->signal >= 0 && c->signal <= 20))
        return persia_err_set(PERSIA_EARG, "signal is %g, need 0 to 20",
                              c->signal);
    return PERSIA_OK;
}

/* Murmur3's finaliser: a bijection. */
static inline uint64_t synth_mix(uint64_t x)
{
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCDu;
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53u;
    return x ^ (x >> 33);
}

/* Different ranks of a feature have different ids. */
static inline uint64_t synth_rank_id(const feature *f, uint32_t rank)
{
    return synth_mix(f->id_key + rank);
}

/* The raw effects of a rank, in [-1, 1). */
static inline void synth_rank_effects(const feature *f, uint32_t rank,
                                      float fade, float out[EFFECTS])
{
    uint64_t bits = synth_mix(f->effect_key + rank);
    for (int e = 0; e < EFFECTS; e++)
        out[e] = (float)(int16_t)(bits >> (16 * e)) * 0x1p-15f * fade;
}

/* As synth_rank_effects(), of mean 0 and variance 1 over the draws of an id.
 * */
static inline void synth_unit_effects(const feature *f, uint32_t rank,
                                      float fade, float out[EFFECTS])
{
    synth_rank_effects(f, rank, fade, out);
    for (int e = 0; e < EFFECTS; e++)
        out[e] = (out[e] - f->mean[e]) * f->scale[e];
}

static int zipf_begin(zipf_table *z, uint32_t n, double exponent)
{
    z->n = n;
    z->slots = malloc(n * sizeof *z->slots);
    z->p = malloc(n * sizeof *z->p);
    if (!z->slots || !z->p)
        return persia_err_set(PERSIA_ENOMEM, "no memory for %u ids", n);
    double sum = 0;
    for (uint32_t k = 0; k < n; k++)
        sum += z->p[k] = pow(k + 1.0, -exponent);
    for (uint32_t k = 0; k < n; k++)
        z->p[k] /= sum;
    return PERSIA_OK;
}

/* Makes the slots of the probabilities (Vose's construction). */
static int zipf_finish(zipf_table *z)
{
    uint32_t n = z->n;
    double *p = z->p;
    alias_slot *slots = z->slots;
    uint32_t *stack = malloc(n * sizeof *stack);
    if (!stack)
        return persia_err_set(PERSIA_ENOMEM, "no memory for %u ids", n);
    /* Small slots grow from the front of the stack, large from its back. */
    uint32_t small = 0, large = n;
    for (uint32_t k = 0; k < n; k++) {
        p[k] *= n;
        if (p[k] < 1)
            stack[small++] = k;
        else
            stack[--large] = k;
    }
    while (small && large < n) {
        uint32_t s = stack[--small], l = stack[large];
        double keep = p[s] * 0x1p32;
        slots[s].keep = keep >= 0x1p32 ? UINT32_MAX : (uint32_t)keep;
        slots[s].other = l;
        p[l] -= 1 - p[s];
        if (p[l] < 1) {
            large++;
            stack[small++] = l;
        }
    }
    while (small)
        slots[stack[small - 1]] =
            (alias_slot){UINT32_MAX, stack[small - 1]}, small--;
    for (; large < n; large++)
        slots[stack[large]] = (alias_slot){UINT32_MAX, stack[large]};
    free(stack);
    free(p);
    z->p = NULL;
    return PERSIA_OK;
}

static void zipf_free(zipf_table *z)
{
    free(z->slots);
    free(z->p);
}

/* Sets mean and scale of the effects of a feature of vocabulary z. */
static void feature_centre(feature *f, const zipf_table *z,
                           const float *fade)
{
    double mean[EFFECTS] = {0}, square[EFFECTS] = {0};
    for (uint32_t k = 0; k < z->n; k++) {
        float x[EFFECTS];
        synth_rank_effects(f, k, fade[k], x);
        for (int e = 0; e < EFFECTS; e++) {
            mean[e] += z->p[k] * x[e];
            square[e] += z->p[k] * x[e] * x[e];
        }
    }
    for (int e = 0; e < EFFECTS; e++) {
        double variance = square[e] - mean[e] * mean[e];
        f->mean[e] = (float)mean[e];
        f->scale[e] = variance > 1e-12 ? (float)(1 / sqrt(variance)) : 0;
    }
}

/* How much of the singles' variance feature f has: the first ones matter
 * most, as in real logs. */
static double feature_strength(uint32_t f)
{
    return 1 / (1 + f / 3.0);
}

/* Turns the shares into weights of the parts, for the features there are. */
static void synth_weights_set(synth *s)
{
    const synth_config *c = &s->c;
    double pairs = 0.5 * c->singles * (c->singles - 1.0) * RANK;
    double bag = c->max_length / 2.0; /* mean length: 0 .. max_length */
    double singles = c->singles ? share_singles : 0,
           multis = c->multis ? share_multis : 0,
           pair = c->singles > 1 ? share_pairs : 0,
           dense = c->dense ? share_dense : 0,
           product = c->dense > 1 ? share_product : 0;
    double all = c->signal / sqrt(singles + multis + pair + dense);
    s->w_singles = all * sqrt(singles);
    double strengths = 0;
    for (uint32_t f = 0; f < c->singles; f++)
        strengths += feature_strength(f);
    for (uint32_t f = 0; f < c->singles; f++)
        s->features[f].scale[0] *=
            (float)sqrt(feature_strength(f) / strengths);
    s->w_multis = c->multis ? all * sqrt(multis / (c->multis * bag)) : 0;
    s->w_pairs = pair > 0 ? all * sqrt(pair / pairs) : 0;
    double squares = 0;
    for (uint32_t j = 0; j < c->dense; j++)
        squares += (double)s->w_dense[j] * s->w_dense[j];
    for (uint32_t j = 0; j < c->dense; j++)
        s->w_dense[j] *=
            (float)(all * sqrt(dense * (1 - product) / squares));
    s->w_product = (float)(all * sqrt(dense * product));
    /* E[sigmoid(b + N(0, v))] is about sigmoid(b / sqrt(1 + pi v / 8)). */
    double variance = c->signal * c->signal;
    s->bias = log(c->ctr / (1 - c->ctr)) *
              sqrt(1 + 3.14159265358979 / 8 * variance);
}

static int tables_fill(synth *s)
{
    const synth_config *c = &s->c;
    uint32_t tenth = (c->vocabulary + 9) / 10;
    int rc = zipf_begin(&s->singles, c->vocabulary, c->zipf);
    if (!rc)
        rc = zipf_begin(&s->multis, tenth, c->zipf);
    if (rc)
        return rc;
    for (uint32_t k = 0; k < c->vocabulary; k++)
        s->fade[k] = (float)sqrt(COMMON_IDS / (double)(COMMON_IDS + k));
    for (uint32_t f = 0; f < c->singles + c->multis; f++) {
        feature *feat = &s->features[f];
        feat->id_key = synth_mix(c->seed ^ 0x1D5u) + ((uint64_t)f << 32);
        feat->effect_key =
            synth_mix(c->seed ^ 0xEFFEC7u) + ((uint64_t)f << 32);
        feature_centre(feat, f < c->singles ? &s->singles : &s->multis,
                       s->fade);
    }
    for (uint32_t j = 0; j < c->dense; j++) {
        uint64_t bits = synth_mix(synth_mix(c->seed ^ 0xDE5Eu) + j);
        float x = (float)(int32_t)(bits >> 32) * 0x1p-31f;
        s->w_dense[j] = x < 0 ? x - 0.25f : x + 0.25f; /* none is near 0 */
    }
    synth_weights_set(s);
    rc = zipf_finish(&s->singles);
    return rc ? rc : zipf_finish(&s->multis);
}

int persia_synth_create(const synth_config *config, synth **out)
{
    int rc = config_check(config);
    if (rc)
        return rc;
    const synth_config *c = config;
    size_t features = c->singles + c->multis;
    synth *s = calloc(1, sizeof *s);
    if (!s)
        goto fail;
    s->c = *c;
    s->key[0] = (uint32_t)c->seed;
    s->key[1] = (uint32_t)(c->seed >> 32);
    s->word_bag = 2 * (size_t)c->singles;
    s->word_dense =
        s->word_bag + 2 * (size_t)c->multis * (1 + (size_t)c->max_length);
    s->word_label = s->word_dense + 2 * (size_t)c->dense;
    s->blocks = (s->word_label + 2 + 3) / 4;
    s->fade = malloc(c->vocabulary * sizeof *s->fade);
    s->features = calloc(features, sizeof *s->features);
    s->w_dense = calloc(c->dense + 1, sizeof *s->w_dense);
    if (!s->fade || !s->features || !s->w_dense)
        goto fail;
    rc = tables_fill(s);
    if (rc)
        goto fail;
    *out = s;
    return PERSIA_OK;
fail:
    persia_synth_destroy(s);
    return rc ? rc
              : persia_err_set(PERSIA_ENOMEM, "no memory for %u ids",
                               c->vocabulary);
}

void persia_synth_destroy(synth *s)
{
    if (!s)
        return;
    zipf_free(&s->singles);
    zipf_free(&s->multis);
    free(s->fade);
    free(s->features);
    free(s->w_dense);
    free(s);
}

size_t persia_synth_ids_room(const synth *s, size_t n)
{
    return n * (s->c.singles + (size_t)s->c.multis * s->c.max_length);
}

/* Enough words for any configuration, in whole blocks. */
enum {
    BLOCKS_MAX = (2 * (SINGLES_MAX + MULTIS_MAX * (1 + LENGTH_MAX) +
                       DENSE_MAX + 1) + 3) / 4,
};

/* Fills `blocks` blocks of row `row`; word w of block b is at
 * out[w * blocks + b], so that the loop runs over neighbours. */
static inline void row_words(const synth *s, uint64_t row, size_t blocks,
                             uint32_t *out)
{
    for (size_t b = 0; b < blocks; b++) {
        uint32_t counter[4] = {(uint32_t)row, (uint32_t)(row >> 32),
                               (uint32_t)b, 0};
        uint32_t words[4];
        philox4x32(counter, s->key, words);
        for (size_t w = 0; w < 4; w++)
            out[w * blocks + b] = words[w];
    }
}

static inline uint32_t synth_rank_draw(const zipf_table *z,
                                       const uint32_t *words)
{
    uint32_t k = (uint32_t)(((uint64_t)words[0] * z->n) >> 32);
    alias_slot slot = z->slots[k];
    return words[1] < slot.keep ? k : slot.other;
}

/* About normal: the sum of four uniform numbers, centred and scaled. */
static inline float synth_normal_draw(const uint32_t *words)
{
    uint32_t sum = (words[0] & 0xFFFF) + (words[0] >> 16) +
                   (words[1] & 0xFFFF) + (words[1] >> 16);
    return ((float)sum - 131070.0f) * (1.7320508f / 65536);
}

/* The parts of singles; writes their ids, `room` apart. */
static inline double synth_singles_draw(const synth *s, const uint32_t *words,
                                        uint64_t *ids, size_t room)
{
    float sum[EFFECTS] = {0}, squares[EFFECTS] = {0};
    for (uint32_t f = 0; f < s->c.singles; f++) {
        const feature *feat = &s->features[f];
        uint32_t rank = synth_rank_draw(&s->singles, words + 2 * f);
        float x[EFFECTS];
        ids[f * room] = synth_rank_id(feat, rank);
        synth_unit_effects(feat, rank, s->fade[rank], x);
        for (int e = 0; e < EFFECTS; e++) {
            sum[e] += x[e];
            squares[e] += x[e] * x[e];
        }
    }
    double pairs = 0;
    for (int e = 1; e < EFFECTS; e++)
        pairs += 0.5 * ((double)sum[e] * sum[e] - (double)squares[e]);
    return s->w_singles * sum[0] + s->w_pairs * pairs;
}

/* The part of multis; the ids of bag m go to ids + m * bag_room, where
 * used[m] are there already. */
static inline double synth_multis_draw(const synth *s, const uint32_t *words,
                                       uint64_t *ids, size_t bag_room,
                                       size_t *used, int64_t *lengths,
                                       size_t room)
{
    double sum = 0;
    for (uint32_t m = 0; m < s->c.multis; m++) {
        const feature *feat = &s->features[s->c.singles + m];
        uint32_t length =
            (uint32_t)(((uint64_t)words[0] * (s->c.max_length + 1)) >> 32);
        words += 2;
        for (uint32_t i = 0; i < length; i++) {
            uint32_t rank = synth_rank_draw(&s->multis, words + 2 * i);
            float x[EFFECTS];
            ids[m * bag_room + used[m]++] = synth_rank_id(feat, rank);
            synth_unit_effects(feat, rank, s->fade[rank], x);
            sum += x[0];
        }
        words += 2 * s->c.max_length;
        lengths[m * room] = length;
    }
    return s->w_multis * sum;
}

static inline double synth_dense_draw(const synth *s, const uint32_t *words,
                                      float *dense)
{
    double sum = 0;
    for (uint32_t j = 0; j < s->c.dense; j++) {
        dense[j] = synth_normal_draw(words + 2 * j);
        sum += (double)s->w_dense[j] * dense[j];
    }
    if (s->c.dense > 1)
        sum += (double)s->w_product * dense[0] * dense[1];
    return sum;
}

HOT size_t persia_synth_read(const synth *s, uint64_t first, size_t n,
                             const synth_rows *out)
{
    const synth_config *c = &s->c;
    uint32_t words[4 * BLOCKS_MAX];
    uint64_t *bags = out->ids + c->singles * n;
    size_t bag_room = n * c->max_length, used[MULTIS_MAX] = {0};
    for (size_t i = 0; i < n; i++) {
        row_words(s, first + i, s->blocks, words);
        float *dense = out->dense + i * c->dense;
        double z =
            s->bias + synth_singles_draw(s, words, out->ids + i, n) +
            synth_multis_draw(s, words + s->word_bag, bags + 0, bag_room, used,
                              out->lengths + c->singles * n + i, n) +
            synth_dense_draw(s, words + s->word_dense, dense);
        const uint32_t *word = words + s->word_label;
        double u = ((double)word[0] + word[1] * 0x1p-32) * 0x1p-32;
        out->label[i] = u < 1 / (1 + exp(-z));
        if (out->logit)
            out->logit[i] = (float)z;
    }
    for (size_t i = 0; i < c->singles * n; i++)
        out->lengths[i] = 1;
    size_t total = c->singles * n;
    for (uint32_t m = 0; m < c->multis; m++) {
        memmove(out->ids + total, bags + m * bag_room,
                used[m] * sizeof *bags);
        total += used[m];
    }
    return total;
}
