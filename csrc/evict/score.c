/* score.c: the user's score, a function or an expression.
 *
 *   sum     = product (("+" | "-") product)*
 *   product = factor (("*" | "/") factor)*
 *   factor  = "-" factor | "(" sum ")" | number | "age" | "count" | "norm"
 *           | ("min" | "max") "(" sum "," sum ")" | "sqrt" "(" sum ")"
 *
 * It becomes a program in postfix order, which runs over a window of rows one
 * operation at a time.
 */
#include "evict/policies.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum op_code {
    OP_NUMBER, OP_AGE, OP_COUNT, OP_NORM, /* push */
    OP_NEGATE, OP_SQRT,                   /* replace the top */
    OP_ADD, OP_SUBTRACT, OP_MULTIPLY, OP_DIVIDE, OP_MIN, OP_MAX
};

/* ---- compiling ---------------------------------------------------------- */

typedef struct parser {
    const char *text, *at;
    evictor *out;
    uint32_t depth, nested; /* of the program's stack; of factors */
} parser;

static int score_parse_sum(parser *p);

static int score_refuse(const parser *p, const char *why)
{
    return persia_err_set(PERSIA_EARG,
                          "eviction: the score '%.80s' is wrong at column "
                          "%zu: %s",
                          p->text, (size_t)(p->at - p->text) + 1, why);
}

static char score_peek(parser *p)
{
    while (*p->at == ' ' || *p->at == '\t' || *p->at == '\n')
        p->at++;
    return *p->at;
}

static int score_accept(parser *p, char c)
{
    if (score_peek(p) != c)
        return 0;
    p->at++;
    return 1;
}

static int score_expect(parser *p, char c)
{
    char why[] = "a '?' is needed";

    if (score_accept(p, c))
        return PERSIA_OK;
    why[3] = c;
    return score_refuse(p, why);
}

static int score_emit(parser *p, enum op_code code, float number)
{
    if (p->out->ops == EVICT_OPS)
        return score_refuse(p, "it has more than 64 operations");
    if (code <= OP_NORM && ++p->depth > EVICT_STACK)
        return score_refuse(p, "it nests more than 16 values");
    if (code >= OP_ADD)
        p->depth--;
    p->out->op[p->out->ops++] = (evict_op){ code, number };
    return PERSIA_OK;
}

/* The arguments of a function, behind its name. */
static int score_parse_call(parser *p, enum op_code code)
{
    int rc = score_expect(p, '(');

    rc = rc ? rc : score_parse_sum(p);
    if (!rc && code >= OP_ADD) {
        rc = score_expect(p, ',');
        rc = rc ? rc : score_parse_sum(p);
    }
    rc = rc ? rc : score_expect(p, ')');
    return rc ? rc : score_emit(p, code, 0);
}

static int score_parse_name(parser *p)
{
    static const struct {
        const char *name;
        enum op_code code;
    } names[] = { { "age", OP_AGE },   { "count", OP_COUNT },
                  { "norm", OP_NORM }, { "min", OP_MIN },
                  { "max", OP_MAX },   { "sqrt", OP_SQRT } };
    size_t n = 0;

    while ((p->at[n] >= 'a' && p->at[n] <= 'z') || p->at[n] == '_')
        n++;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const enum op_code code = names[i].code;
        if (strlen(names[i].name) != n || memcmp(names[i].name, p->at, n))
            continue;
        p->at += n;
        p->out->reads_norm |= code == OP_NORM;
        return code <= OP_NORM ? score_emit(p, code, 0)
                               : score_parse_call(p, code);
    }
    return score_refuse(
        p, "need a number, age, count, norm, min, max, sqrt or '('");
}

static int score_is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* By hand: strtof() depends on the process's locale. */
static int score_parse_number(parser *p)
{
    double number = 0, unit = 1;
    int exponent = 0, negative;

    if (!score_is_digit(p->at[p->at[0] == '.']))
        return score_refuse(p, "a digit is needed");
    for (; score_is_digit(*p->at); p->at++)
        number = number * 10 + (*p->at - '0');
    for (p->at += *p->at == '.'; score_is_digit(*p->at); p->at++)
        number += (unit /= 10) * (*p->at - '0');
    if (*p->at == 'e' || *p->at == 'E') {
        negative = *++p->at == '-';
        p->at += negative || *p->at == '+';
        if (!score_is_digit(*p->at))
            return score_refuse(p, "an exponent is needed");
        for (; score_is_digit(*p->at); p->at++)
            exponent = exponent < 100 ? exponent * 10 + (*p->at - '0') : 100;
        for (; exponent; exponent--)
            number = negative ? number / 10 : number * 10;
    }
    if (!(number <= (double)FLT_MAX))
        return score_refuse(p, "the number is too large");
    return score_emit(p, OP_NUMBER, (float)number);
}

static int score_parse_factor(parser *p)
{
    const char c = score_peek(p);
    int rc;

    if (p->nested == EVICT_STACK)
        return score_refuse(p, "it nests more than 16 values");
    p->nested++;
    if (score_accept(p, '-')) {
        rc = score_parse_factor(p);
        rc = rc ? rc : score_emit(p, OP_NEGATE, 0);
    } else if (score_accept(p, '(')) {
        rc = score_parse_sum(p);
        rc = rc ? rc : score_expect(p, ')');
    } else if (score_is_digit(c) || c == '.') {
        rc = score_parse_number(p);
    } else {
        rc = score_parse_name(p);
    }
    p->nested--;
    return rc;
}

static int score_parse_product(parser *p)
{
    int rc = score_parse_factor(p);

    while (!rc && (score_peek(p) == '*' || *p->at == '/')) {
        const enum op_code code = *p->at++ == '*' ? OP_MULTIPLY : OP_DIVIDE;
        rc = score_parse_factor(p);
        rc = rc ? rc : score_emit(p, code, 0);
    }
    return rc;
}

static int score_parse_sum(parser *p)
{
    int rc = score_parse_product(p);

    while (!rc && (score_peek(p) == '+' || *p->at == '-')) {
        const enum op_code code = *p->at++ == '+' ? OP_ADD : OP_SUBTRACT;
        rc = score_parse_product(p);
        rc = rc ? rc : score_emit(p, code, 0);
    }
    return rc;
}

int persia_evict_compile(const char *text, evictor *out)
{
    parser p = { .text = text, .at = text, .out = out };

    out->ops = 0;
    out->reads_norm = 0;
    int rc = score_parse_sum(&p);
    if (!rc && score_peek(&p))
        rc = score_refuse(&p, "an operator is needed");
    return rc;
}

/* ---- running ------------------------------------------------------------ */

static void score_run_binary(enum op_code code, size_t n, float *restrict a,
                             const float *restrict b)
{
#define EACH(value)                                                           \
    for (size_t i = 0; i < n; i++)                                            \
        a[i] = value;                                                         \
    break
    switch (code) {
    case OP_ADD: EACH(a[i] + b[i]);
    case OP_SUBTRACT: EACH(a[i] - b[i]);
    case OP_MULTIPLY: EACH(a[i] * b[i]);
    case OP_DIVIDE: EACH(a[i] / b[i]);
    case OP_MIN: EACH(b[i] < a[i] ? b[i] : a[i]);
    default: EACH(b[i] > a[i] ? b[i] : a[i]);
    }
#undef EACH
}

static void score_run_unary(enum op_code code, size_t n, float *a)
{
    for (size_t i = 0; i < n; i++)
        a[i] = code == OP_SQRT ? sqrtf(a[i]) : -a[i];
}

static void score_run_push(const evict_op *op, const evict_rows *rows,
                           float *out)
{
    const float *from = op->code == OP_AGE     ? rows->age
                        : op->code == OP_COUNT ? rows->count
                                               : rows->norm;

    for (size_t i = 0; i < rows->n; i++)
        out[i] = op->code == OP_NUMBER ? op->number : from[i];
}

static void score_score(const evictor *e, uint32_t now, const evict_rows *rows,
                        float *out)
{
    float stack[EVICT_STACK][EVICT_WINDOW];
    size_t top = 0;

    (void)now;
    if (e->fn) {
        e->fn(e->fn_ctx, rows, out);
        return;
    }
    for (uint32_t k = 0; k < e->ops; k++) {
        const enum op_code code = e->op[k].code;
        if (code <= OP_NORM)
            score_run_push(&e->op[k], rows, stack[top++]);
        else if (code < OP_ADD)
            score_run_unary(code, rows->n, stack[top - 1]);
        else
            score_run_binary(code, rows->n, stack[top - 2], stack[top - 1]),
                top--;
    }
    memcpy(out, stack[0], rows->n * sizeof *out);
}

/* ---- the policy --------------------------------------------------------- */

static int score_make(const table_spec *spec, evictor *e)
{
    e->field = evict_field_count;
    if (!e->fn)
        return persia_evict_compile(spec->evict_score, e);
    e->reads_norm = 1;
    return PERSIA_OK;
}

static void score_touch(const evictor *e, uint32_t now, size_t n,
                        const float *age, uint32_t *field)
{
    float count[EVICT_WINDOW];

    (void)e;
    (void)now;
    (void)age;
    memcpy(count, field, n * sizeof *count);
    for (size_t i = 0; i < n; i++)
        count[i]++; /* up to 2^24 */
    memcpy(field, count, n * sizeof *count);
}

const evict_policy policy_evict_score = { .make = score_make,
                                          .touch = score_touch,
                                          .score = score_score };
