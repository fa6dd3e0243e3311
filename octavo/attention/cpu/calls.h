// What Python, the attention kernels and the decoder's layers (gemm/cpu/c/stack.c) tell one another.

#pragma once

#include <stddef.h>
#include <stdint.h>

#include "../../kernels/c/team.h"

// From BAD_ROW on in the order of Plan's arrays; kernel.py says what was expected.
enum {
    OK, NO_MEMORY, BAD_SIZES, BAD_SCORES, BAD_BLOCK,
    BAD_ROW, BAD_BEGIN, BAD_END, BAD_TOKEN_BEGIN, BAD_TOKEN, BAD_SLOT, BAD_ORDER, BAD_MERGE, UNWRITTEN
};

// The arrays of ForestPlan, in its order; `slots` are its item_partial_ids, not rows of the cache. For an error,
// fault_index is the index in the array (in the block table: row * columns + column), and fault_value the value.
typedef struct {
    const int32_t *table_row, *kv_begin, *kv_end, *token_begin, *tokens, *slots, *order, *merge_begin;
    int64_t num_items, num_pairs, num_tokens, num_partials;
    int64_t fault_index, fault_value;
} Plan;

// Strides are in elements. lse and partials are contiguous: [T, H], [partials, H, D], [partials, H].
typedef struct {
    const float *q;
    const void *k, *v;                         // float32, or bfloat16
    const int32_t *table, *positions;
    const float *alibi;                        // [H], or NULL
    float *out, *lse, *partial_out, *partial_lse;
    int64_t q_token, q_head, k_block, k_token, k_head, v_block, v_token, v_head, table_row;
    int64_t num_tokens, num_rows, num_columns; // of q, and of the table
    int64_t num_blocks, block_size, num_heads, num_kv_heads, head_dim;
    int64_t kv_bytes;                          // of a number of the cache: 4, or 2
    int64_t window;                            // 0: none
    float scale, softcap;                      // softcap 0: none
} Call;

// Keys and values [T, KH, D] and where they go; strides in elements, slot -1 writes nothing.
typedef struct {
    const float *k, *v;
    void *k_cache, *v_cache;                   // float32, or bfloat16
    const int64_t *slots;
    int64_t k_token, k_head, v_token, v_head, kc_block, kc_token, kc_head, vc_block, vc_token, vc_head;
    int64_t num_tokens, num_kv_heads, head_dim, num_slots, block_size;
    int64_t kv_bytes;                          // of a number of the cache: 4, or 2
} Store;

// The memory in which a thread attends; NULL: there is none. `free` frees it.
typedef struct Scratch Scratch;
Scratch *octavo_new_scratch(int64_t most, const Call *c);

// The most query tokens of an item of a plan, which its scratch is made for.
int64_t octavo_most_tokens(const Plan *p);

// OK, or what is wrong with a step; then the plan says where.
int octavo_check_call(Plan *p, const Call *c);

// Every thread of a team calls it, with memory of its own, and returns when all is done. Attends a step that
// octavo_check_call finds OK.
void octavo_attend_in_team(Team *team, const Plan *p, const Call *c, Scratch *s);

// -1, or the first token whose slot does not exist.
int64_t octavo_bad_slot(const Store *c);

// Rotates and stores one token; its slot exists.
void octavo_rotate_token(float *heads, const float *rotation, int64_t num_heads, int64_t head_dim);
void octavo_store_token(const Store *c, int64_t token);
