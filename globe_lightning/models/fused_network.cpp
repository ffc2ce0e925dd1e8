// The multilayer perceptrons of a batch of (target, source) pairs, and their gradient, a tile of pairs at a time, so
// that hidden layers stay in the innermost caches. Compiled by fused_network.py, which describes the arguments.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 4;
#elif defined(__AVX__)
constexpr int LANES = 8, VECTORS = 2;
#elif defined(__aarch64__)
constexpr int LANES = 4, VECTORS = 4;
#else
constexpr int LANES = 4, VECTORS = 2;
#endif
constexpr int ROWS = 6;    // ROWS x VECTORS sums are held in registers
constexpr int TILE = 48;   // pairs
constexpr int PADDING = 16;  // columns are padded to a multiple of it, on every processor

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef float Unaligned __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t Integers __attribute__((vector_size(LANES * 4)));

inline Vector load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
inline void store(float* to, Vector x) { *reinterpret_cast<Unaligned*>(to) = x; }
inline Vector all(float x) { return x - Vector{}; }  // not +, which would turn -0 into 0 and so cost an addition

// exp(x) = 2^n 2^f to 1e-7: n whole, |f| <= 1/2, and 2^f by the polynomial of degree 6 with the least relative error.
inline Vector exponential(Vector x) {
    const Vector low = all(-87.0f), high = all(88.0f), per_e = all(1.44269504f);
    const Vector round = all(12582912.0f);  // beyond 1.5 * 2^23 lie whole numbers alone
    x = x < low ? low : x;
    x = x > high ? high : x;
    const Vector shifted = x * per_e + round;
    const Vector f = x * per_e - (shifted - round);
    Vector p = all(1.534581242594868e-4f);
    p = p * f + 1.3399930903688073e-3f;
    p = p * f + 9.618489071726799e-3f;
    p = p * f + 5.550328642129898e-2f;
    p = p * f + 2.4022646248340607e-1f;
    p = p * f + 6.931471824645996e-1f;
    p = p * f + 1.0f;
    // The last bits of `shifted` are n: they are added to the exponent.
    return reinterpret_cast<Vector>(reinterpret_cast<Integers>(p) + (reinterpret_cast<Integers>(shifted) << 23));
}

inline Vector silu(Vector z) { return z / (1.0f + exponential(-z)); }

enum class Start { zero, bias, given };

// out[row] = start + in[row] @ weights for `Rows` rows and `Columns` vectors; before and after the activation, if any.
template <int Rows, int Columns, bool Activate>
void product(const float* in, int in_stride, int depth, const float* weights, int width, Start start,
             const float* bias, float* before, int before_stride, float* out, int out_stride) {
    Vector sums[Rows][Columns];
    for (int i = 0; i < Rows; ++i)
        for (int j = 0; j < Columns; ++j)
            sums[i][j] = start == Start::zero   ? Vector{}
                         : start == Start::bias ? load(bias + j * LANES)
                                                : load(out + i * out_stride + j * LANES);
    for (int k = 0; k < depth; ++k) {
        Vector w[Columns];
        for (int j = 0; j < Columns; ++j) w[j] = load(weights + k * width + j * LANES);
        for (int i = 0; i < Rows; ++i) {
            const Vector x = all(in[i * in_stride + k]);
            for (int j = 0; j < Columns; ++j) sums[i][j] += x * w[j];
        }
    }
    for (int i = 0; i < Rows; ++i)
        for (int j = 0; j < Columns; ++j) {
            if (before) store(before + i * before_stride + j * LANES, sums[i][j]);
            store(out + i * out_stride + j * LANES, Activate ? silu(sums[i][j]) : sums[i][j]);
        }
}

// total[k] += sum over rows of left[row][k] * right[row], for `Depth` k and `Columns` vectors.
template <int Depth, int Columns>
void outer_product(const float* left, int left_stride, const float* right, int width, int rows, float* total) {
    Vector sums[Depth][Columns];
    for (int k = 0; k < Depth; ++k)
        for (int j = 0; j < Columns; ++j) sums[k][j] = load(total + k * width + j * LANES);
    for (int row = 0; row < rows; ++row) {
        Vector y[Columns];
        for (int j = 0; j < Columns; ++j) y[j] = load(right + row * width + j * LANES);
        for (int k = 0; k < Depth; ++k) {
            const Vector x = all(left[row * left_stride + k]);
            for (int j = 0; j < Columns; ++j) sums[k][j] += x * y[j];
        }
    }
    for (int k = 0; k < Depth; ++k)
        for (int j = 0; j < Columns; ++j) store(total + k * width + j * LANES, sums[k][j]);
}

template <int N>
struct Count {
    static constexpr int value = N;
};

// Calls work(count, first) for parts of `n` of at most Most, with the count as a constant.
template <int Most, typename Work>
void in_parts(int n, Work work) {
    int first = 0;
    for (; n - first >= Most; first += Most) work(Count<Most>{}, first);
    if constexpr (Most > 1) {
        if (first < n) in_parts<Most - 1>(n - first, [&](auto count, int i) { work(count, first + i); });
    }
}

// out = [activation of] start + in @ weights, for `rows` rows; those of `in` and `before` have strides of their own.
template <bool Activate>
void multiply(int rows, const float* in, int in_stride, int depth, const float* weights, int width, Start start,
              const float* bias, float* before, int before_stride, float* out) {
    in_parts<VECTORS>(width / LANES, [&](auto columns, int first_column) {
        const int j = first_column * LANES;
        in_parts<ROWS>(rows, [&](auto count, int i) {
            product<decltype(count)::value, decltype(columns)::value, Activate>(
                in + i * in_stride, in_stride, depth, weights + j, width, start, bias ? bias + j : nullptr,
                before ? before + i * before_stride + j : nullptr, before_stride, out + i * width + j, width);
        });
    });
}

// total += left^T @ right over `rows` rows.
void add_outer_product(int rows, const float* left, int left_stride, int depth, const float* right, int width,
                       float* total) {
    in_parts<VECTORS>(width / LANES, [&](auto columns, int first_column) {
        const int j = first_column * LANES;
        in_parts<ROWS>(depth, [&](auto count, int k) {
            outer_product<decltype(count)::value, decltype(columns)::value>(
                left + k, left_stride, right + j, width, rows, total + k * width + j);
        });
    });
}

void add_rows(int rows, const float* x, int width, float* total) {
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < width; j += LANES) store(total + j, load(total + j) + load(x + i * width + j));
}

// silu(z) and its derivative, for `rows` rows of `stride` values apart.
void activate(int rows, int width, const float* z, int64_t stride, float* value, float* slope) {
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < width; j += LANES) {
            const Vector x = load(z + i * stride + j);
            const Vector sigmoid = 1.0f / (1.0f + exponential(-x)), y = x * sigmoid;
            store(value + i * width + j, y);
            store(slope + i * width + j, sigmoid + y * (1.0f - sigmoid));
        }
}

void scale(int n, const float* factors, float* x) {
    for (int i = 0; i < n; i += LANES) store(x + i, load(x + i) * load(factors + i));
}

int padded(int n) { return (n + PADDING - 1) / PADDING * PADDING; }

// The transpose of (rows, columns) with rows of the result padded by zeros.
std::vector<float> transposed(const float* x, int rows, int columns) {
    const int width = padded(rows);
    std::vector<float> out(static_cast<size_t>(columns) * width);
    for (int i = 0; i < rows; ++i)
        for (int j = 0; j < columns; ++j) out[static_cast<size_t>(j) * width + i] = x[static_cast<size_t>(i) * columns + j];
    return out;
}

typedef float Four __attribute__((vector_size(16)));
typedef float UnalignedFour __attribute__((vector_size(16), aligned(4), may_alias));
#if defined(__clang__)
#define SHUFFLE(x, y, a, b, c, d) __builtin_shufflevector(x, y, a, b, c, d)
#else
typedef int32_t FourIntegers __attribute__((vector_size(16)));
#define SHUFFLE(x, y, a, b, c, d) __builtin_shuffle(x, y, FourIntegers{a, b, c, d})
#endif

inline void transpose_four(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
    Four x[4];
    for (int k = 0; k < 4; ++k) x[k] = *reinterpret_cast<const UnalignedFour*>(from + k * from_stride);
    const Four a = SHUFFLE(x[0], x[1], 0, 4, 1, 5), b = SHUFFLE(x[2], x[3], 0, 4, 1, 5);
    const Four c = SHUFFLE(x[0], x[1], 2, 6, 3, 7), d = SHUFFLE(x[2], x[3], 2, 6, 3, 7);
    const Four y[4] = {SHUFFLE(a, b, 0, 1, 4, 5), SHUFFLE(a, b, 2, 3, 6, 7), SHUFFLE(c, d, 0, 1, 4, 5),
                       SHUFFLE(c, d, 2, 3, 6, 7)};
    for (int k = 0; k < 4; ++k) *reinterpret_cast<UnalignedFour*>(to + k * to_stride) = y[k];
}

// to[pair][k] = from[k][pair] and back, for `n` k and `rows` pairs of a tile. `far` is the stride among all pairs: what
// lies so far apart is touched a whole line at a time.
template <bool Back>
void transpose(std::conditional_t<Back, float, const float>* all_pairs, int64_t far, int n, int rows,
               std::conditional_t<Back, const float, float>* tile, int width) {
    auto one = [&](int k, int i) {
        if constexpr (Back) all_pairs[k * far + i] = tile[i * width + k];
        else tile[i * width + k] = all_pairs[k * far + i];
    };
    int k = 0;
    for (; k + 4 <= n; k += 4) {
        int i = 0;
        for (; i + 4 <= rows; i += 4) {
            if constexpr (Back) transpose_four(tile + i * width + k, width, all_pairs + k * far + i, far);
            else transpose_four(all_pairs + k * far + i, far, tile + i * width + k, width);
        }
        for (; i < rows; ++i)
            for (int j = 0; j < 4; ++j) one(k + j, i);
    }
    for (; k < n; ++k)
        for (int i = 0; i < rows; ++i) one(k, i);
}

// Shares whole tiles among threads: work(thread, first pair, last pair).
template <typename Work>
void in_threads(int64_t pairs, int threads, Work work) {
    const int64_t tiles = (pairs + TILE - 1) / TILE;
    auto begin = [&](int thread) { return tiles * thread / threads * TILE; };
    auto end = [&](int thread) { return std::min(pairs, tiles * (thread + 1) / threads * TILE); };
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back([&, i] { work(i, begin(i), end(i)); });
    work(0, begin(0), end(0));
    for (auto& other : others) other.join();
}

}  // namespace

struct Network {
    int64_t branches, pairs, sources, columns, outputs, layers, threads;
    const int64_t* widths;         // of the hidden layers
    const float* x;                // (branches, columns, pairs)
    const float* terms;            // (branches, sources, width): of the first hidden layer
    const int64_t* rows;           // (pairs): of the terms; null for all sources in turn
    const float* const* matrices;  // into each hidden layer (branches, width before, width)
    const float* const* biases;    // of each hidden layer after the first (branches, width)
    const float* last;             // (branches, outputs, width)
    const float* last_bias;        // (branches, outputs)
    float* before;                 // hidden layers before their activation (branches, pairs, sum of widths), or null
};

// raw: (branches, outputs, pairs)
extern "C" void network_outputs(const Network* network, float* raw) {
    const Network& n = *network;
    const int top = n.widths[n.layers - 1], columns = n.columns, outputs = n.outputs, width = padded(outputs);
    int widest = width, all_widths = 0;
    for (int l = 0; l < n.layers; ++l) {
        widest = std::max<int>(widest, n.widths[l]);
        all_widths += n.widths[l];
    }
    for (int64_t b = 0; b < n.branches; ++b) {
        const std::vector<float> last = transposed(n.last + b * outputs * top, outputs, top);
        std::vector<float> last_bias(width);
        std::memcpy(last_bias.data(), n.last_bias + b * outputs, outputs * sizeof(float));
        in_threads(n.pairs, n.threads, [&](int, int64_t begin, int64_t end) {
            std::vector<float> of_tile(TILE * (columns + 2 * widest));
            float *x = of_tile.data(), *in = x + TILE * columns, *out = in + TILE * widest;
            for (int64_t first = begin; first < end; first += TILE) {
                const int rows = std::min<int64_t>(TILE, end - first);
                float* before = n.before ? n.before + (b * n.pairs + first) * all_widths : nullptr;
                transpose<false>(n.x + b * columns * n.pairs + first, n.pairs, columns, rows, x, columns);
                const int bottom = n.widths[0];
                for (int i = 0; i < rows; ++i) {
                    const int64_t row = n.rows ? n.rows[first + i] : (first + i) % n.sources;
                    std::memcpy(in + i * bottom, n.terms + (b * n.sources + row) * bottom, bottom * sizeof(float));
                }
                multiply<true>(rows, x, columns, columns, n.matrices[0] + b * columns * bottom, bottom, Start::given,
                               nullptr, before, all_widths, in);
                for (int l = 1; l < n.layers; ++l) {
                    const int w = n.widths[l], depth = n.widths[l - 1];
                    if (before) before += depth;
                    multiply<true>(rows, in, depth, depth, n.matrices[l] + b * depth * w, w, Start::bias,
                                   n.biases[l - 1] + b * w, before, all_widths, out);
                    std::swap(in, out);
                }
                multiply<false>(rows, in, top, top, last.data(), width, Start::bias, last_bias.data(), nullptr, 0, out);
                transpose<true>(raw + b * outputs * n.pairs + first, n.pairs, outputs, rows, out, width);
            }
        });
    }
}

// of_raw: as raw. Written: of_columns as x; of_terms, a row for every pair (branches, pairs, width). Added to:
// of_weights, for each branch all [matrix, bias but for the first] of the hidden layers, the last matrix and its bias,
// padded.
extern "C" void network_gradients(const Network* network, const float* of_raw, float* of_columns, float* of_terms,
                                  float* of_weights) {
    const Network& n = *network;
    const int layers = n.layers, top = n.widths[layers - 1], bottom = n.widths[0];
    const int columns = n.columns, outputs = n.outputs, width = padded(outputs), column_width = padded(columns);
    int widest = std::max(width, column_width), all_widths = 0;
    std::vector<int64_t> places;  // of each hidden layer's matrix in the sums
    int64_t size = 0;
    for (int l = 0; l < layers; ++l) {
        const int64_t w = n.widths[l];
        places.push_back(size);
        size += l ? (n.widths[l - 1] + 1) * w : columns * w;
        widest = std::max<int>(widest, w);
        all_widths += w;
    }
    const int64_t place_of_last = size;
    size += outputs * top + width;
    for (int64_t b = 0; b < n.branches; ++b) {
        std::vector<std::vector<float>> back(layers);
        for (int l = 0; l < layers; ++l) {
            const int depth = l ? n.widths[l - 1] : columns;
            back[l] = transposed(n.matrices[l] + b * depth * n.widths[l], depth, n.widths[l]);
        }
        std::vector<float> of_others(size * (n.threads - 1));
        in_threads(n.pairs, n.threads, [&](int thread, int64_t begin, int64_t end) {
            std::vector<float> of_tile(TILE * (columns + 5 * widest));
            float *x = of_tile.data(), *g = x + TILE * columns, *value = g + TILE * widest;
            float *slope = value + TILE * widest, *of_out = slope + TILE * widest, *of_in = of_out + TILE * widest;
            float* sums = thread ? of_others.data() + size * (thread - 1) : of_weights + size * b;
            for (int64_t first = begin; first < end; first += TILE) {
                const int rows = std::min<int64_t>(TILE, end - first);
                const float* before = n.before + (b * n.pairs + first) * all_widths + all_widths - top;
                transpose<false>(of_raw + b * outputs * n.pairs + first, n.pairs, outputs, rows, g, width);
                activate(rows, top, before, all_widths, value, slope);
                add_outer_product(rows, g, width, outputs, value, top, sums + place_of_last);
                add_rows(rows, g, width, sums + place_of_last + outputs * top);
                multiply<false>(rows, g, width, outputs, n.last + b * outputs * top, top, Start::zero, nullptr, nullptr,
                                0, of_out);
                scale(rows * top, slope, of_out);
                for (int l = layers - 1; l > 0; --l) {
                    const int w = n.widths[l], depth = n.widths[l - 1];
                    before -= depth;
                    activate(rows, depth, before, all_widths, value, slope);
                    add_outer_product(rows, value, depth, depth, of_out, w, sums + places[l]);
                    add_rows(rows, of_out, w, sums + places[l] + depth * w);
                    multiply<false>(rows, of_out, w, w, back[l].data(), depth, Start::zero, nullptr, nullptr, 0, of_in);
                    scale(rows * depth, slope, of_in);
                    std::swap(of_in, of_out);
                }
                transpose<false>(n.x + b * columns * n.pairs + first, n.pairs, columns, rows, x, columns);
                add_outer_product(rows, x, columns, columns, of_out, bottom, sums + places[0]);
                multiply<false>(rows, of_out, bottom, bottom, back[0].data(), column_width, Start::zero, nullptr,
                                nullptr, 0, of_in);
                transpose<true>(of_columns + b * columns * n.pairs + first, n.pairs, columns, rows, of_in, column_width);
                std::memcpy(of_terms + (b * n.pairs + first) * bottom, of_out, rows * bottom * sizeof(float));
            }
        });
        for (size_t i = 0; i < of_others.size(); ++i) of_weights[size * b + i % size] += of_others[i];
    }
}
