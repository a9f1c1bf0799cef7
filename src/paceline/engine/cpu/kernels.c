/* What a decode step does again and again, for 64-bit ARM and float32.
 *
 * The BLAS underneath torch copies ("packs") the whole weight matrix before every product. With thousands of rows that
 * pays; with the few rows of a decode step it costs as much as the product. Here four rows of x meet four rows of w in
 * registers. A row's result never depends on the rows beside it.
 *
 * Everything is row-major and dense. Threads are OpenMP's, the same that torch uses.
 */
#include <arm_neon.h>
#include <math.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* This thread's share of `count` pieces of work. */
typedef struct { size_t first, last; } share;
static inline share my_share(size_t count) {
    const size_t threads = omp_get_num_threads(), me = omp_get_thread_num();
    return (share){count * me / threads, count * (me + 1) / threads};
}

/* e^x to about 2e-7, for x up to 88: 2^n times a polynomial on half an octave either side of 1. */
static inline float32x4_t exp4(float32x4_t x) {
    x = vmaxq_f32(vminq_f32(x, vdupq_n_f32(88.0f)), vdupq_n_f32(-87.0f));
    const float32x4_t n = vrndnq_f32(vmulq_n_f32(x, 1.44269504f));
    float32x4_t r = vfmaq_n_f32(x, n, -0.693359375f);
    r = vfmaq_n_f32(r, n, 2.12194440e-4f);
    float32x4_t p = vdupq_n_f32(1.0f / 720);
    p = vfmaq_f32(vdupq_n_f32(1.0f / 120), p, r);
    p = vfmaq_f32(vdupq_n_f32(1.0f / 24), p, r);
    p = vfmaq_f32(vdupq_n_f32(1.0f / 6), p, r);
    p = vfmaq_f32(vdupq_n_f32(0.5f), p, r);
    p = vfmaq_f32(vdupq_n_f32(1.0f), p, r);
    p = vfmaq_f32(vdupq_n_f32(1.0f), p, r);
    const int32x4_t power = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
    return vmulq_f32(p, vreinterpretq_f32_s32(power));
}

/* ---- products: out[m][n] = x[m][k] . w[n][k] + bias[n] ----------------------------------------------------------- */

#define CHUNK 64 /* rows of x that stay in the cache while all of w passes by */

/* Compilers spill an array of accumulators, so each has a name: acc_<row of x>_<row of w>. */
#define GRID(DO)                                                                                                       \
    DO(0, 0) DO(1, 0) DO(2, 0) DO(3, 0) DO(0, 1) DO(1, 1) DO(2, 1) DO(3, 1)                                            \
    DO(0, 2) DO(1, 2) DO(2, 2) DO(3, 2) DO(0, 3) DO(1, 3) DO(2, 3) DO(3, 3)
#define ROWS(DO) DO(0) DO(1) DO(2) DO(3)

static inline void store(float *out, float32x4_t sum, const float *bias, size_t columns) {
    if (columns == 4) {
        vst1q_f32(out, bias ? vaddq_f32(sum, vld1q_f32(bias)) : sum);
        return;
    }
    float row[4];
    vst1q_f32(row, sum);
    for (size_t c = 0; c < columns; c++) out[c] = row[c] + (bias ? bias[c] : 0.0f);
}

#define ZERO(r, c) float32x4_t acc_##r##_##c = vdupq_n_f32(0.0f);
#define LOAD(r) const float32x4_t a_##r = vld1q_f32(x[r] + i), b_##r = vld1q_f32(w[r] + i);
#define MULTIPLY(r, c) acc_##r##_##c = vfmaq_f32(acc_##r##_##c, a_##r, b_##c);
#define FOLD(r) sum[r] = vpaddq_f32(vpaddq_f32(acc_##r##_0, acc_##r##_1), vpaddq_f32(acc_##r##_2, acc_##r##_3));

/* Sixteen dot products. */
static inline void tile(const float *const x[4], const float *const w[4], size_t k, float32x4_t sum[4]) {
    GRID(ZERO)
    size_t i = 0;
    for (; i + 4 <= k; i += 4) {
        ROWS(LOAD)
        GRID(MULTIPLY)
    }
    ROWS(FOLD)
    for (; i < k; i++) {
        const float32x4_t b = {w[0][i], w[1][i], w[2][i], w[3][i]};
        for (int r = 0; r < 4; r++) sum[r] = vfmaq_n_f32(sum[r], b, x[r][i]);
    }
}

/* Weights straight from where they lie. Rows beyond the last are the last once more: computed, but not stored. */
void paceline_linear(const float *x, const float *w, const float *bias, float *out, size_t m, size_t n, size_t k) {
#pragma omp parallel
    {
        const share mine = my_share((n + 3) / 4);
        for (size_t chunk = 0; chunk < m; chunk += CHUNK) {
            const size_t end = least(chunk + CHUNK, m);
            for (size_t block = mine.first; block < mine.last; block++) {
                const size_t j = 4 * block, columns = least(4, n - j);
                const float *wj[4];
                for (size_t c = 0; c < 4; c++) wj[c] = w + least(j + c, n - 1) * k;
                for (size_t i = chunk; i < end; i += 4) {
                    const float *xi[4];
                    for (size_t r = 0; r < 4; r++) xi[r] = x + least(i + r, m - 1) * k;
                    float32x4_t sum[4];
                    tile(xi, wj, k, sum);
                    for (size_t r = 0; r < least(4, m - i); r++)
                        store(out + (i + r) * n + j, sum[r], bias ? bias + j : NULL, columns);
                }
            }
        }
    }
}

/* ---- the same in float16, twice as fast --------------------------------------------------------------------------
 *
 * Both sides are rounded to float16 (weights that were bfloat16 lose nothing). At most 24 products are summed in one
 * float16 lane before the sums move on to float32, which leaves half the error of rounding x to bfloat16. Each row of x
 * is first brought to at most 1 in size, so neither it nor a sum leaves float16's range.
 *
 * Four rows lie interleaved, eight numbers of each in turn: [row / 4][k / 8][row % 4][k % 8]. So both sides are read in
 * one straight line, and the missing rows of the last four, and columns beyond k, are zeros.
 */
#ifdef __ARM_FEATURE_FP16_VECTOR_ARITHMETIC

#define SPAN 192   /* products along k until the sums move on to float32: 24 in each of 8 lanes */
#define AHEAD 1024 /* weights asked of the memory before they are needed */

#define ZERO16(r, c) float16x8_t acc_##r##_##c = vdupq_n_f16(0.0f);
#define LOAD16(r) const float16x8_t a_##r = vld1q_f16(x + 8 * r), b_##r = vld1q_f16(w + 8 * r);
#define MULTIPLY16(r, c) acc_##r##_##c = vfmaq_f16(acc_##r##_##c, a_##r, b_##c);
#define FOLD16(r)                                                                                                      \
    {                                                                                                                  \
        float16x8_t all = vpaddq_f16(vpaddq_f16(acc_##r##_0, acc_##r##_1), vpaddq_f16(acc_##r##_2, acc_##r##_3));      \
        sum[r] = vaddq_f32(sum[r], vpaddq_f32(vcvt_f32_f16(vget_low_f16(all)), vcvt_high_f32_f16(all)));               \
    }

static inline void tile_half(const float16_t *x, const float16_t *w, size_t k, float32x4_t sum[4]) {
    for (int r = 0; r < 4; r++) sum[r] = vdupq_n_f32(0.0f);
    for (size_t i = 0; i < k; i += SPAN) {
        const float16_t *end = x + 4 * least(SPAN, k - i);
        GRID(ZERO16)
        for (; x < end; x += 32, w += 32) {
            __builtin_prefetch(w + AHEAD);
            ROWS(LOAD16)
            GRID(MULTIPLY16)
        }
        ROWS(FOLD16)
    }
}

/* Row i of x into `small`, scaled to at most 1; answers with the scale. `k8` is k rounded up to a multiple of 8. */
static float pack_row(const float *row, float16_t *small, size_t i, size_t k, size_t k8) {
    float16_t *to = small + i / 4 * 4 * k8 + i % 4 * 8;
    float most = 0.0f;
    for (size_t j = 0; j < k; j++) most = fmaxf(most, fabsf(row[j]));
    const float scale = most > 0.0f ? most : 1.0f, by = 1.0f / scale;
    size_t j = 0;
    for (; j + 8 <= k; j += 8) {
        const float16x4_t low = vcvt_f16_f32(vmulq_n_f32(vld1q_f32(row + j), by));
        vst1q_f16(to + 4 * j, vcvt_high_f16_f32(low, vmulq_n_f32(vld1q_f32(row + j + 4), by)));
    }
    for (; j < k8; j++) to[4 * (j / 8 * 8) + j % 8] = j < k ? (float16_t)(row[j] * by) : (float16_t)0;
    return scale;
}

/* `small` has room for m * k numbers and `scales` for m, both rounded up as said above; w is interleaved already. */
void paceline_linear_half(const float *x, const float16_t *w, const float *bias, float *out, float16_t *small,
                          float *scales, size_t m, size_t n, size_t k) {
    const size_t k8 = (k + 7) / 8 * 8;
#pragma omp parallel
    {
        const share rows = my_share(m), mine = my_share((n + 3) / 4);
        for (size_t i = rows.first; i < rows.last; i++) scales[i] = pack_row(x + i * k, small, i, k, k8);
#pragma omp barrier
        for (size_t chunk = 0; chunk < m; chunk += CHUNK) {
            const size_t end = least(chunk + CHUNK, m);
            for (size_t block = mine.first; block < mine.last; block++) {
                const size_t j = 4 * block, columns = least(4, n - j);
                for (size_t i = chunk; i < end; i += 4) {
                    float32x4_t sum[4];
                    tile_half(small + i * k8, w + j * k8, k8, sum);
                    for (size_t r = 0; r < least(4, m - i); r++)
                        store(out + (i + r) * n + j, vmulq_n_f32(sum[r], scales[i + r]), bias ? bias + j : NULL,
                              columns);
                }
            }
        }
    }
}

#endif

/* ---- attention of a decode step: one query per slot over its keys and values, where they lie ----------------------- */

#define PIECE 16 /* positions whose scores are held at once; a multiple of 4 */
#define MOST_HEADS 256

/* One query with four keys. */
static inline float32x4_t dots(const float *q, const float *const k[4], size_t dim) {
    float32x4_t s[4] = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)};
    float32x4_t t[4] = {vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)};
    for (size_t i = 0; i < dim; i += 8) {
        const float32x4_t low = vld1q_f32(q + i), high = vld1q_f32(q + i + 4);
        for (int p = 0; p < 4; p++) s[p] = vfmaq_f32(s[p], low, vld1q_f32(k[p] + i));
        for (int p = 0; p < 4; p++) t[p] = vfmaq_f32(t[p], high, vld1q_f32(k[p] + i + 4));
    }
    for (int p = 0; p < 4; p++) s[p] = vaddq_f32(s[p], t[p]);
    return vpaddq_f32(vpaddq_f32(s[0], s[1]), vpaddq_f32(s[2], s[3]));
}

static inline void fetch(const float *from, size_t count) {
    for (size_t i = 0; i < count; i += 16) __builtin_prefetch(from + i);
}

/* sum += weights . values, sixteen columns at a time so that they stay in registers. */
static inline void mix(float *sum, const float *values, const float *weights, size_t count, size_t stride, size_t dim) {
    for (size_t d = 0; d < dim; d += 16) {
        float32x4_t s0 = vld1q_f32(sum + d), s1 = vld1q_f32(sum + d + 4);
        float32x4_t s2 = vld1q_f32(sum + d + 8), s3 = vld1q_f32(sum + d + 12);
        for (size_t p = 0; p < count; p++) {
            const float *value = values + p * stride + d;
            s0 = vfmaq_n_f32(s0, vld1q_f32(value), weights[p]);
            s1 = vfmaq_n_f32(s1, vld1q_f32(value + 4), weights[p]);
            s2 = vfmaq_n_f32(s2, vld1q_f32(value + 8), weights[p]);
            s3 = vfmaq_n_f32(s3, vld1q_f32(value + 12), weights[p]);
        }
        vst1q_f32(sum + d, s0), vst1q_f32(sum + d + 4, s1), vst1q_f32(sum + d + 8, s2), vst1q_f32(sum + d + 12, s3);
    }
}

typedef struct {
    float most, total;
} running;

/* One query over one piece of positions: `out` and `so_far` hold the sum and its size until now. */
static void attend_piece(const float *q, const float *keys, const float *values, float *out, running *so_far,
                         size_t count, size_t stride, size_t dim, float scale) {
    const size_t fours = (count + 3) / 4 * 4;
    float score[PIECE];
    float32x4_t highest = vdupq_n_f32(so_far->most), weights = vdupq_n_f32(0.0f);
    for (size_t p = 0; p < fours; p += 4) {
        const float *k[4];
        for (size_t i = 0; i < 4; i++) k[i] = keys + least(p + i, count - 1) * stride;
        const float32x4_t scores = vmulq_n_f32(dots(q, k, dim), scale);
        highest = vmaxq_f32(highest, scores); /* beyond the last position stands the last once more */
        vst1q_f32(score + p, scores);
    }
    for (size_t p = count; p < fours; p++) score[p] = -INFINITY;
    const float top = vmaxvq_f32(highest);
    if (top > so_far->most) {
        const float shrink = expf(so_far->most - top);
        for (size_t d = 0; d < dim; d++) out[d] *= shrink;
        *so_far = (running){top, so_far->total * shrink};
    }
    for (size_t p = 0; p < fours; p += 4) {
        const float32x4_t weight = exp4(vsubq_f32(vld1q_f32(score + p), vdupq_n_f32(top)));
        weights = vaddq_f32(weights, weight);
        vst1q_f32(score + p, weight);
    }
    so_far->total += vaddvq_f32(weights);
    mix(out, values, score, count, stride, dim);
}

/* q and out are [rows][heads][dim]; keys and values [slots][length][kv_heads][dim]. Row r is token number last[r] of
 * slot slots[r] and sees itself and the `window` - 1 before it (0: all). dim is a multiple of 16. All heads of a piece
 * are done before the next piece, so that the cache is read in one straight line. */
void paceline_attend(const float *q, const float *keys, const float *values, float *out, const int64_t *slots,
                     const int64_t *last, size_t rows, size_t heads, size_t kv_heads, size_t dim, size_t length,
                     size_t window, float scale) {
    const size_t group = heads / kv_heads, stride = kv_heads * dim;
#pragma omp parallel for schedule(dynamic)
    for (size_t r = 0; r < rows; r++) {
        const size_t to = (size_t)last[r] + 1, from = window && window < to ? to - window : 0;
        running so_far[MOST_HEADS];
        for (size_t h = 0; h < heads; h++) so_far[h] = (running){-INFINITY, 0.0f};
        memset(out + r * heads * dim, 0, heads * dim * sizeof(float));
        for (size_t at = from; at < to; at += PIECE) {
            const size_t there = ((size_t)slots[r] * length + at) * stride, count = least(PIECE, to - at);
            const size_t next = least(PIECE, to - least(to, at + PIECE)) * stride / heads;
            for (size_t h = 0; h < heads; h++) {
                const size_t here = (r * heads + h) * dim, part = there + h / group * dim;
                fetch(keys + there + PIECE * stride + h * next, next);
                fetch(values + there + PIECE * stride + h * next, next);
                attend_piece(q + here, keys + part, values + part, out + here, so_far + h, count, stride, dim, scale);
            }
        }
        for (size_t h = 0; h < heads; h++)
            for (size_t d = 0; d < dim; d++) out[(r * heads + h) * dim + d] /= so_far[h].total;
    }
}

/* New keys and values to their places, before they are attended to. `width` is kv_heads * dim. */
void paceline_keep(const float *k, const float *v, float *keys, float *values, const int64_t *slots,
                   const int64_t *positions, size_t rows, size_t length, size_t width) {
    for (size_t r = 0; r < rows; r++) {
        const size_t there = ((size_t)slots[r] * length + (size_t)positions[r]) * width;
        memcpy(keys + there, k + r * width, width * sizeof(float));
        memcpy(values + there, v + r * width, width * sizeof(float));
    }
}

/* ---- between the products ---------------------------------------------------------------------------------------- */

/* out = x / sqrt(mean(x^2) + epsilon) * (weight + offset), row by row */
void paceline_norm(const float *x, const float *weight, float *out, size_t rows, size_t dim, float epsilon,
                   float offset) {
#pragma omp parallel for schedule(static) if (rows * dim > 32768)
    for (size_t r = 0; r < rows; r++) {
        const float *row = x + r * dim;
        float32x4_t squares = vdupq_n_f32(0.0f);
        size_t i = 0;
        for (; i + 4 <= dim; i += 4) squares = vfmaq_f32(squares, vld1q_f32(row + i), vld1q_f32(row + i));
        float sum = vaddvq_f32(squares);
        for (; i < dim; i++) sum += row[i] * row[i];
        const float by = 1.0f / sqrtf(sum / (float)dim + epsilon);
        for (i = 0; i < dim; i++) out[r * dim + i] = row[i] * by * (weight[i] + offset);
    }
}

/* gate = silu(gate) * up, in place */
void paceline_gate(float *gate, const float *up, size_t count) {
#pragma omp parallel if (count > 8192)
    {
        const share mine = my_share((count + 3) / 4);
        for (size_t i = 4 * mine.first; i < least(4 * mine.last, count); i += 4) {
            if (i + 4 <= count) {
                const float32x4_t g = vld1q_f32(gate + i), one = vdupq_n_f32(1.0f);
                const float32x4_t sigmoid = vdivq_f32(one, vaddq_f32(one, exp4(vnegq_f32(g))));
                vst1q_f32(gate + i, vmulq_f32(vmulq_f32(g, sigmoid), vld1q_f32(up + i)));
            } else {
                for (size_t j = i; j < count; j++) gate[j] = gate[j] / (1.0f + expf(-gate[j])) * up[j];
            }
        }
    }
}
